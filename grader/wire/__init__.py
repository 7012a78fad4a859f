"""What both ends use, values, the connection and names; and what goes from one to the other, such as drawn inputs."""
