"""The command line, and what joins the stages: one module a command, each imported only when it runs."""
