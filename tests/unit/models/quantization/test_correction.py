"""What a float8 engine does to the gradient of a policy, exactly: over all next tokens, not over samples.

With p the trainer's next-token probabilities and g the engine's, the gradient of the expected reward r by the logits is
p (r - E_p r) for the trainer's own samples, and g w r - p E_g[w r] for the engine's with the weights w.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.losses.objectives import make_truncation
from nemo_rl.models.quantization import FP8_ACTIVATIONS, FP8_WEIGHTS, WeightQuantization, rounded

MODEL = REPOSITORY_ROOT / "examples/assets/tiny-chat"
PROMPT = "<|im_start|>user\n{}=<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = {
    "27+41": r"7+1=8,#2+4=6, \boxed{68}",
    "13+52": r"3+2=5,#1+5=6, \boxed{65}",
    "35+12": r"5+2=7,#3+1=4, \boxed{47}",
    "46+53": r"6+3=9,#4+5=9, \boxed{99}",
}
"""Answers such as the model gives, to problems of the quick start."""
CORRECTIONS = {
    "none": None,
    "TIS, bound 2": ("tis", 0.0, 2.0),
    "IcePop, bounds 0.9 and 1.1": ("icepop", 0.9, 1.1),
    "IcePop, bounds 0.5 and 2": ("icepop", 0.5, 2.0),
}


@torch.no_grad()
def next_token_logprobs() -> tuple[Tensor, Tensor]:
    """Return `[N, V]` log-probabilities of each token of the answers: of the trainer, and of a float8 engine."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL).float()
    prompts = [tokenizer.encode(PROMPT.format(problem)) for problem in ANSWERS]
    rows = [torch.tensor([tokenizer.encode(PROMPT.format(problem) + answer)]) for problem, answer in ANSWERS.items()]

    def scores() -> Tensor:
        logits = [model(row).logits[0, len(prompt) - 1 : -1] for row, prompt in zip(rows, prompts, strict=True)]
        return torch.cat(logits).double().log_softmax(-1)

    exact = scores()
    quantization = WeightQuantization(FP8_WEIGHTS, model.config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and quantization.takes(f"{name}.weight", tuple(module.weight.shape)):
            module.weight.copy_(rounded(module.weight, FP8_WEIGHTS))
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0][0], FP8_ACTIVATIONS)[None],))
    return exact, scores()


def biases() -> dict[str, float]:
    """Return the norm of the gradient's error over that of the gradient, by correction; rewards are random, 0 or 1."""
    trainer_NV, engine_NV = next_token_logprobs()
    p_NV, g_NV, ratio_NV = trainer_NV.exp(), engine_NV.exp(), trainer_NV - engine_NV
    reward_NV = (torch.rand(p_NV.shape, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    want_NV = p_NV * (reward_NV - (p_NV * reward_NV).sum(-1, keepdim=True))
    found = {}
    for name, correction in CORRECTIONS.items():
        weights_NV = torch.ones_like(p_NV)
        if correction is not None:
            weights_NV = make_truncation(*correction)(ratio_NV.exp(), ratio_NV, torch.ones_like(p_NV)).weights_BT
        seen_NV = g_NV * weights_NV * reward_NV
        got_NV = seen_NV - p_NV * seen_NV.sum(-1, keepdim=True)
        found[name] = float((got_NV - want_NV).norm() / want_NV.norm())
    return found


def test_correction_takes_the_bias_of_a_float8_engine_away() -> None:
    found = biases()
    page = (REPOSITORY_ROOT / "docs/machines/fp8.md").read_text()
    lines = [f"| {name} | {100 * bias:.2f} % |" for name, bias in found.items()]
    assert found["TIS, bound 2"] < 0.01 * found["none"] and found["none"] < found["IcePop, bounds 0.9 and 1.1"]
    assert not [line for line in lines if line not in page], "\n".join(lines)
