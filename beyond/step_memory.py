"""stub"""


def what_would_fit(config):
    return "use x"
