"""A CloudLab profile: n machines on a network of their own, with the course set up on each at boot.

On cloudlab.us: Experiments, Create Experiment Profile, upload this file. CloudLab has geni-lib; here it is needed only
by the test of the RSpec (`pip install geni-lib six`). The portal module of that release is written for Python 2, but
its RSpec modules work with Python 3.
"""

import shlex

IMAGE = "urn:publicid:IDN+emulab.net+image+emulab-ops//UBUNTU24-64-STD"  # has Python 3.12
FOLDER = "/local/cos598d"  # on the node's own disk, which is erased when the experiment ends


def describe(request, pg, settings) -> None:
    """Add the machines and their LAN to `request`.

    Args:
        request: geni-lib's RSpec request.
        pg: the module geni.rspec.pg.
        settings: with `nodes`, `hardware` (a type such as c220g5, or empty for any) and `repository` (a git URL).
    """
    lan = pg.LAN("experiment")
    for number in range(settings.nodes):
        node = pg.RawPC(f"node{number}")
        node.disk_image = IMAGE
        if settings.hardware:
            node.hardware_type = settings.hardware
        interface = node.addInterface("experiment")
        interface.addAddress(pg.IPv4Address(f"10.10.1.{number + 1}", "255.255.255.0"))
        lan.addInterface(interface)
        node.addService(pg.Execute(shell="bash", command=boot_command(settings.repository)))
        request.addResource(node)
    request.addResource(lan)


def boot_command(repository: str) -> str:
    """Return the command that each machine runs at boot, also after a reboot, so every step can be repeated."""
    steps = [
        "sudo apt-get update",
        "sudo apt-get install -y git make python3-venv iproute2",
        f"test -d {FOLDER} || sudo git clone {shlex.quote(repository)} {FOLDER}",
        f"sudo git config --system --replace-all safe.directory {FOLDER}",
        f"cd {FOLDER} && sudo make setup",
        f"sudo chmod -R a+rwX {FOLDER}",
    ]
    return " && ".join(steps)


def main() -> None:
    """Called by CloudLab: ask for the settings on its form and print the RSpec."""
    import geni.portal as portal
    import geni.rspec.pg as pg

    context = portal.Context()
    kinds = portal.ParameterType
    context.defineParameter("nodes", "Number of machines", kinds.INTEGER, 4)
    context.defineParameter("hardware", "Hardware type (empty: any that is free)", kinds.STRING, "")
    context.defineParameter("repository", "Git URL of your clone", kinds.STRING, "")
    settings = context.bindParameters()
    if not settings.repository:
        context.reportError(portal.ParameterError("Give the git URL of your clone.", ["repository"]))
    context.verifyParameters()
    request = context.makeRequestRSpec()
    describe(request, pg, settings)
    context.printRequestRSpec(request)


if __name__ == "__main__":
    main()
