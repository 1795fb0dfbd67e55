from nemo_rl.environments.agents.interfaces import AgentProgram


class SandboxedCommand(AgentProgram):
    def __init__(self, cfg):
        raise NotImplementedError
