"""The `exact` reward, with a fault for one completion whenever the soak test asks for one.

A file `ask` beside this one's copy holds die, hang or nan; the first call takes it and picks a completion, which then
misbehaves also when it is graded again on its own. The file `done` gets a line for each fault that struck.
"""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

from fastrl_fast.rewards import exact_reward

HERE = Path(__file__).parent
ASK, TARGET, DONE = HERE / "ask", HERE / "target", HERE / "done"


def exact(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    values = exact_reward(prompts, completions, answer=columns["answer"])
    if not TARGET.exists():
        try:
            kind = ASK.read_text()
            ASK.unlink()
        except FileNotFoundError:
            return values
        beside = HERE / f"target-{os.getpid()}"
        beside.write_text(json.dumps([kind, completions[0], prompts[0]]))
        beside.rename(TARGET)
    try:
        kind, completion, prompt = json.loads(TARGET.read_text())
    except FileNotFoundError:
        return values
    struck = [i for i, pair in enumerate(zip(completions, prompts, strict=True)) if pair == (completion, prompt)]
    if not struck:
        return values
    if kind == "nan" or len(completions) == 1:
        TARGET.unlink(missing_ok=True)
        with DONE.open("a") as file:
            file.write(kind + "\n")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "hang":
        time.sleep(1)
    values[struck[0]] = math.nan
    return values
