"""Train a model with your own loss: three steps of a tiny chat model, on the CPU.

    uv run --extra cpu python examples/own_loss.py

The cells are those of docs/start/notebook.md; on a GPU change DEVICE.
"""

# %% A policy: a model with its optimizer, in its own process
import nemo_rl

DEVICE = "cpu"  # "cuda" on a GPU; nothing else changes

policy = nemo_rl.open_policy("examples/assets/tiny-chat", device=DEVICE, learning_rate=1e-3)

# %% A batch: conversations, in which the assistant's tokens count
sums = [(37, 85), (12, 9), (64, 28), (51, 46), (93, 17), (25, 60), (88, 34), (70, 19)]
conversations = [
    [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": f"It is {a + b}."}] for a, b in sums
]
batch = nemo_rl.chat_batch(policy.tokenizer, conversations)


# %% A loss: a function from log-probabilities of tokens to the loss of each token
@nemo_rl.token_loss
def focal_loss(logprobs, data):
    """Return a likelihood loss in which tokens that the model already predicts well count less (Lin et al. 2017)."""
    return -((1 - logprobs.exp()) ** 2) * logprobs


# %% Three steps
for step in range(1, 4):
    result = policy.train(batch, focal_loss)
    print(f"step {step}  loss={result['loss'].item():.4f}  nll={result['metrics']['nll']:.4f}")

# %% Keep the model: results/own_loss/model loads with transformers and vLLM
policy.save_checkpoint("results/own_loss")
policy.shutdown()
