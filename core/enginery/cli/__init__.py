"""The `engine` command, one file per subcommand."""
