"""Checks of `policy.generation` with SGLang's servers."""

from collections.abc import Sequence

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.model.generation import GenerationConfig

_SIZES = ("dp_size", "pp_size", "ep_size")


def check_sglang(section: str, generation: GenerationConfig, counts: Sequence[int]) -> Findings:
    """Check that servers can be started or are named, and that they can do what is asked.

    Args:
        section: name of the section of `generation`.
        generation: the section.
        counts: ranks of generation on each machine; empty or zeros: not known yet.
    """
    if generation.backend != "sglang":
        return
    keys, config = f"{section}.sglang_cfg", generation.sglang_cfg
    router = config.sglang_router_config
    if router.use_external_router:
        if router.sglang_router_ip is None or router.sglang_router_port is None:
            yield (
                f"{keys}.sglang_router_config.use_external_router=true needs the address of the server or router: "
                "sglang_router_ip and sglang_router_port."
            )
        if sum(counts) > 1:
            yield (
                f"{keys}.sglang_router_config.use_external_router=true gives the run one engine, and there are "
                f"{sum(counts)} ranks of generation. Use one rank: {section}.colocated.enabled=false with "
                "colocated.resources.ranks_per_node=1 (gpus_per_node=1 with GPUs)."
            )
    else:
        sizes = {"tp_size": config.tp_size} | {name: config.server_args.get(name) or 1 for name in _SIZES}
        large = [f"{name}={size}" for name, size in sizes.items() if size != 1]
        if large:
            yield (
                f"{keys}: {', '.join(large)}, but the library starts servers of one GPU. Set it to 1, which starts a "
                "server for each GPU, or start larger ones by hand: sglang_router_config.use_external_router=true."
            )
    if generation.bad_words:
        yield f"{section}.bad_words: SGLang has no bad words. Remove them, or use {section}.backend=vllm."
    mode = config.sglang_server_config.pause_generation_mode
    keeps, recomputes = mode == "in_place", generation.weight_sync.recompute_kv_cache
    if keeps == recomputes:
        yield (
            f"{keys}.sglang_server_config.pause_generation_mode={mode} {'keeps' if keeps else 'computes again'} the "
            "keys and values of running answers, but "
            f"{section}.weight_sync.recompute_kv_cache={str(recomputes).lower()}. Use "
            f"{'abort or retract' if keeps else 'in_place'}, or set recompute_kv_cache={str(not keeps).lower()}."
        )
