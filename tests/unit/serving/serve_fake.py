"""Serve the fake models in a process that tests kill: PORT FOLDER DELAY."""

import asyncio
import sys

from fake_models import FakeModels

from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.serving.http.server import serving


async def main(port: int, folder: str, delay_s: float) -> None:
    config = ServiceConfig.build(state_dir=folder, port=port, state_every=3, log_dir=None)
    async with serving(FakeModels(delay_s=delay_s), config, ["tiny"]) as address:
        print(f"Serving on {address}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
