"""The commands of the command line, one module each: options, a few calls of the library, tables or JSON."""
