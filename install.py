"""Makes .venv and installs the tested versions into it; run by `make setup`. Does nothing where that is done already.

Written for old Pythons too, so that they can be told what is missing.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request

NEEDED = (3, 11)
HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own, as its documentation names it
EXTRAS = sys.argv[1:]


def stop(message):
    sys.exit("error: " + message)


def read(name):
    with open(os.path.join(HERE, name)) as file:
        return file.read()


def requirements():
    """requirements.txt and the extras of pyproject.toml that were asked for."""
    import tomllib

    lines = [line.strip() for line in read("requirements.txt").splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for name in EXTRAS:
        if name not in extras:
            stop("expected some of " + ", ".join(extras) + "; got " + name)
        wanted += extras[name]
    return wanted


def torch_index():
    """Return where to look for the CPU build of torch; nothing if there is a GPU or the index cannot be reached.

    pip would retry an unreachable index for minutes, so it is tried once, briefly, beforehand.
    """
    if os.environ.get("TORCH_INDEX"):
        index = os.environ["TORCH_INDEX"]
    elif shutil.which("nvidia-smi"):
        return []
    else:
        index = CPU_INDEX
    try:
        urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=5).close()
    except (OSError, ValueError) as error:
        print(f"note: {index} cannot be reached ({error}); torch comes from pip's own index")
        return []
    return ["--extra-index-url", index]


def make_venv():
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop("this Python has no venv module; sudo apt-get install python{}.{}-venv".format(*sys.version_info[:2]))
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)


def main():
    if sys.version_info < NEEDED:
        came = "{}.{}".format(*sys.version_info[:2])
        stop("Python 3.11 or newer is needed, this is " + came + "; try make PYTHON=python3.12, or install python3.12")
    if not shutil.which("c++") and not shutil.which("g++"):
        print("note: no C++ compiler (only DeepSpeed needs one): sudo apt-get install g++")
    state = hashlib.sha256((read("constraints.txt") + repr(requirements()) + sys.version).encode()).hexdigest()
    stamp = os.path.join(VENV, "installed-" + "-".join(["base", *EXTRAS]))
    if os.path.exists(stamp) and read(stamp) == state:
        return
    python = os.path.join(VENV, "bin", "python")
    if not os.path.exists(python):
        make_venv()
    print("installing into .venv, a few minutes the first time; pip shows each package", flush=True)
    constraints = os.path.join(HERE, "constraints.txt")
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        constraints,
        *torch_index(),
        *requirements(),
    ]
    if subprocess.run(command).returncode:
        stop("pip could not install what is needed; see its message above. Free disk space: 10 GB are enough")
    with open(stamp, "w") as file:
        file.write(state)
    print("done; now: source .venv/bin/activate")


if __name__ == "__main__":
    main()
