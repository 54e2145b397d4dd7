"""The subcommands of `sie`: their flags, output and exit statuses."""
