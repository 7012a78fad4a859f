"""Makes .venv and installs the tested versions into it; run by `make setup`. Does nothing where that is done already.

Written for old Pythons too, so that they can be told what is missing.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

NEEDED, NEWEST = (3, 11), (3, 14)
HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own, as its documentation names it
EXTRAS = sys.argv[1:]
HOROVOD = "0.28.1"


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


def install_horovod(pip):
    """Build Horovod from its source distribution: there is no wheel. It asks for C++14, torch's headers for C++20."""
    missing = " and ".join(name for name in ("cmake", "g++") if not shutil.which(name))
    if missing:
        stop("Horovod is built with cmake and g++; there is no " + missing + ": sudo apt-get install cmake g++")
    log = os.path.join(VENV, "horovod.log")
    with tempfile.TemporaryDirectory() as folder, open(log, "w") as output:

        def run(*command, **env):
            return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env={**os.environ, **env})

        source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "horovod==" + HOROVOD]
        if run(*pip, "download", *source).wait():
            stop("pip could not download Horovod's source distribution; see " + log)
        shutil.unpack_archive(os.path.join(folder, "horovod-" + HOROVOD + ".tar.gz"), folder)
        tree = os.path.join(folder, "horovod-" + HOROVOD)
        for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            with open(os.path.join(tree, name)) as file:
                text = file.read()
            with open(os.path.join(tree, name), "w") as file:
                file.write(text.replace("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"))
        on = ["WITH_PYTORCH", "WITH_GLOO", "WITHOUT_MPI", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET"]
        choices = {**{"HOROVOD_" + name: "1" for name in on}, "HOROVOD_CPU_OPERATIONS": "GLOO"}
        began, text = time.time(), "building Horovod with g++, about 6 minutes on two cores: {:.0f} s"
        build = run(*pip, "install", *source[:2], tree, MAKEFLAGS="-j" + str(os.cpu_count()), **choices)
        while build.poll() is None:
            print("\r" + text.format(time.time() - began), end="", flush=True)
            time.sleep(1)
        print()
        if build.returncode:
            stop("Horovod could not be built; see the end of " + log)


def main():
    if sys.version_info < NEEDED:
        came = "{}.{}".format(*sys.version_info[:2])
        stop("Python 3.11 or newer is needed, this is " + came + "; try make PYTHON=python3.12, or install python3.12")
    if sys.version_info[:2] > NEWEST:
        print("note: this Python is newer than {}.{}, the newest that was tried".format(*NEWEST))
    if "benchmark" in EXTRAS and not (shutil.which("c++") or shutil.which("g++")):
        print("note: no C++ compiler, which DeepSpeed needs: sudo apt-get install g++")
    state = hashlib.sha256((read("constraints.txt") + repr(requirements()) + sys.version).encode()).hexdigest()
    stamp = os.path.join(VENV, "installed-" + "-".join(["base", *EXTRAS]))
    if os.path.exists(stamp) and read(stamp) == state:
        return
    python = os.path.join(VENV, "bin", "python")
    if not os.path.exists(os.path.join(VENV, "bin", "pip")):  # it comes last
        make_venv()
    index = torch_index()
    size = (
        "0.4 GB to download, 1.6 GB on disk" if index or sys.platform == "darwin" else "1.6 GB to download, 5.6 on disk"
    )
    print("installing into .venv, 2 to 8 minutes the first time (" + size + "); if it stops, run it again", flush=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    wanted = ["-c", os.path.join(HERE, "constraints.txt"), *index, *requirements()]
    if subprocess.run([*pip, "install", *wanted]).returncode:
        stop("pip could not install what is needed; see its message above. Free disk space: 10 GB are enough")
    if "horovod" in EXTRAS:
        install_horovod(pip)
    with open(stamp, "w") as file:
        file.write(state)
    print("done; now: source .venv/bin/activate")


if __name__ == "__main__":
    main()
