"""What both ends use: values, the connection, drawn inputs, names."""
