"""`python -m mesh_tensorflow` lists the programs of the package."""

import sys

from mesh_tensorflow import _command_lines

if __name__ == "__main__":  # where importing the package has not listed them already
    _command_lines.show_programs(sys.argv[1:])
