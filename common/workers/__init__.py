"""How a worker joins the others, and how the course makes sure that no worker waits forever."""
