"""The subcommands of `sie`: their flags, their output and their exit statuses."""
