"""Settings of transformer programs, as gin files: defaults, models, layouts, data, learning rates.

`transformer.utils.parse_gin_defaults_and_flags` reads `defaults.gin` first; the others are named
with --gin_file.
"""
