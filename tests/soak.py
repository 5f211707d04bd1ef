"""A long run of the default task under faults: `python -m tests.soak --steps 2000 [--every 50] [arguments of train]`.

Every `--every` steps (0: never, for comparison) one of: a grading worker is killed, an answer hangs, a reward is NaN,
SIGTERM and the same command again. At the end the metrics must hold every step once, memory must have stayed flat, no
process may be left, and the faults must be the only thing that was not graded. Prints what it found; the exit code is 1
where something is wrong.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = ("die", "nan", "hang", "SIGTERM")
GROWTH = 1.10
"""Median memory of the last third of a process's steps over that of the middle third."""
REWARD = Path(__file__).parent / "workers" / "faulty_reward.py"


class Soak:
    def __init__(self, folder: Path, steps: int, every: int, arguments: list[str]) -> None:
        self.folder, self.steps, self.every = folder, steps, every
        shutil.copy(REWARD, folder)
        rewards = f"{{{folder / REWARD.name}:exact: 1.0, format: 0.5}}"
        self.run = folder / "run"
        self.command = [sys.executable, "-m", "fastrl_fast.train", f"--run_dir={self.run}", f"--max_steps={steps}"]
        self.command += [f"--reward.functions={rewards}", "--reward.timeout=2", "--checkpoint.every=25", *arguments]
        self.lives: list[list[tuple[int, float]]] = []
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.lines_read, self.read_to = 0, 0

    def lines(self, name: str) -> list[str]:
        path = self.run / name
        return path.read_text().splitlines() if path.exists() else []

    def steps_done(self) -> int:
        """Lines of the metrics so far, of which only the new ones are read."""
        path = self.run / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self.read_to)
                new = file.read()
            self.read_to += len(new)
            self.lines_read += new.count(b"\n")
        return self.lines_read

    def start(self) -> subprocess.Popen:
        self.lives.append([])
        self.lines_read = self.read_to = 0
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(["env", "--default-signal=INT,TERM", *self.command], stdout=log, stderr=log)

    def go(self) -> None:
        process, due = self.start(), self.every or self.steps
        while (code := process.poll()) is None:
            time.sleep(0.05)
            done = self.steps_done()
            self.note_memory(process.pid, done)
            if done >= due and done < self.steps - 1:
                due = done - done % self.every + self.every
                kind = KINDS[len(self.asked) % len(KINDS)]
                self.asked.append(kind)
                if kind != "SIGTERM":
                    (self.folder / "ask").write_text(kind)
                    continue
                process.send_signal(signal.SIGTERM)
                if (code := process.wait(60)) != 128 + signal.SIGTERM:
                    self.wrong.append(f"SIGTERM ended it with {code}")
                process = self.start()
        if code != 0:
            self.wrong.append(f"exit code {code}: {(self.folder / 'log').read_text()[-2000:]}")

    def note_memory(self, pid: int, done: int) -> None:
        life = self.lives[-1]
        if not life or life[-1][0] != done:
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                return
            life.append((done, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))

    def growth(self) -> list[float]:
        found = []
        for life in self.lives:
            sizes = [size for _, size in life]
            third = len(sizes) // 3
            if third >= 5:
                found.append(statistics.median(sizes[-third:]) / statistics.median(sizes[third : 2 * third]))
        return found

    def memory_by_tenth(self) -> list[int]:
        """Median MB over each tenth of the run's steps, of whichever process ran them."""
        tenths: list[list[float]] = [[] for _ in range(10)]
        for done, size in (point for life in self.lives for point in life):
            tenths[min(9, 10 * done // self.steps)].append(size)
        return [round(statistics.median(tenth)) for tenth in tenths if tenth]

    def report(self) -> dict:
        records = [json.loads(line) for line in self.lines("metrics.jsonl")]
        if [r["step"] for r in records] != list(range(1, self.steps + 1)):
            self.wrong.append(f"steps in metrics.jsonl: {len(records)}, not each of {self.steps} once")
        rollouts = sum(r["rollouts/generated"] for r in records)
        if rollouts != len(self.lines("rollouts.jsonl")):
            self.wrong.append(f"{len(self.lines('rollouts.jsonl'))} lines in rollouts.jsonl for {rollouts} rollouts")
        done = self.folder / "done"
        struck = done.read_text().split() if done.exists() else []
        ungraded = sum(r["dropped/ungraded"] for r in records)
        if ungraded != struck.count("nan"):
            self.wrong.append(f"{ungraded} rollouts were not graded, {struck.count('nan')} rewards were NaN")
        growth = self.growth()
        if any(ratio > GROWTH for ratio in growth):
            self.wrong.append(f"memory grew: {growth}")
        left = subprocess.run(["pgrep", "-f", str(self.folder)], capture_output=True, text=True).stdout.split()
        if left := [pid for pid in left if int(pid) != os.getpid()]:
            self.wrong.append(f"left behind: {left}")
        summary = self.run / "summary.json"
        accuracy = json.loads(summary.read_text()) if summary.exists() else {}
        return {
            "steps": len(records),
            "faults": {kind: struck.count(kind) for kind in KINDS[:3]} | {"SIGTERM": self.asked.count("SIGTERM")},
            "memory growth of each process": [round(ratio, 3) for ratio in growth],
            "MB by tenth of the run": self.memory_by_tenth(),
            "largest MB": round(max((size for life in self.lives for _, size in life), default=0)),
            "before": accuracy.get("before"),
            "after": accuracy.get("after"),
            "wrong": self.wrong,
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options.steps, options.every, arguments)
        soak.go()
        report = soak.report()
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
