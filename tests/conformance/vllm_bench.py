"""`vllm bench serve` from the wheel of vLLM, without its engine: only the pure Python of the command is imported."""

import asyncio
import sys

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm bench serve")
add_cli_args(parser)
result = asyncio.run(main_async(parser.parse_args(sys.argv[1:])))
sys.exit(1 if result["failed"] else 0)
