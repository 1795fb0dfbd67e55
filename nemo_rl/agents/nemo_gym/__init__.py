"""The environment `nemo_gym`, in which agents of NeMo Gym play samples through the endpoint of the run.

    environment ─► program ── POST /run, row + key ──► agent ─► model server ── key in the body ──► endpoint
                      │                                  └─► resources server: tools, reward
                      └─ servers: started by `command`, found through the head server

The modules are imported only when one of their names is used.
"""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(
    __name__,
    {
        "NemoGym": "nemo_rl.agents.nemo_gym.environment",
        "NemoGymConfig": "nemo_rl.config.schema.agents",
        "DEFAULT_INVALID_TOOL_CALL_PATTERNS": "nemo_rl.config.schema.agents",
        "should_use_nemo_gym": "nemo_rl.agents.nemo_gym.servers",
        "extract_reward_components": "nemo_rl.agents.nemo_gym.environment",
    },
)
