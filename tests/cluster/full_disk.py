"""A batch on a cluster whose machines write onto a small disk; it runs where only its own processes see that disk."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
from machines import add_node


def run(words):
    """Run the command until the disk is full, and once more with a larger disk.

    Writes the output of both runs, and the digests of the images.
    """
    from ray.cluster_utils import Cluster

    from sana_core.__main__ import main

    out = Path(words[words.index("--out") + 1])
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", out], check=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        add_node(cluster)
        words[words.index("HERE")] = cluster.address
        for status, size in ((1, "10m"), (0, None)):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                got = main(words)
            sys.stdout.write(f"{said.getvalue()}=====\n")
            assert got == status, said.getvalue()
            if size:
                subprocess.run(["mount", "-o", f"remount,size={size}", out], check=True)
        sys.stdout.write(json.dumps({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.glob("*.png")}))
        sys.stdout.flush()
    finally:
        cluster.shutdown()
        for process in psutil.Process().children(recursive=True):
            process.kill()
