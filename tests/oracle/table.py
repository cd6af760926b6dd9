"""All programs, by the fixture file that they share."""

import programs

FAMILIES = {"language": programs.PROGRAMS}
