"""What people see: the command line, its tables, drawings and measurements."""
