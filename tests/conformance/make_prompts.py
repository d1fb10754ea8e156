"""Writes the embedded chat prompts in the forms that the load tools read:  make_prompts.py FOLDER"""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
prompts = json.loads((Path(__file__).parents[2] / "dflash2_ray/assets/prompts.json").read_text(encoding="utf-8"))[
    "chat"
]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


write(folder / "aiperf.jsonl", [{"text": prompt} for prompt in prompts])
write(folder / "vllm.jsonl", [{"prompt": prompt} for prompt in prompts])
# `dflash benchmark` knows five data sets by name; in a folder that has one of that name, `datasets` takes it from there.
gsm8k = folder / "openai" / "gsm8k"
write(gsm8k / "main" / "test.jsonl", [{"question": prompt, "answer": ""} for prompt in prompts])
(gsm8k / "README.md").write_text(
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test.jsonl\n---\n",
    encoding="utf-8",
)
