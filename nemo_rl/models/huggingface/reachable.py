"""Check within seconds, and before slow imports, that a model can be loaded.

The check runs before Ray starts. Without a network, loading a model would repeat requests for a minute and write many
warnings. Invariant: a folder, or a file in the hub's cache, is accepted without a request to the hub.
"""

import os
import threading
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from nemo_rl.config.base.paths import library_model_hint
from nemo_rl.files.hub_download import pinned
from nemo_rl.utils.errors import ConfigError

TIMEOUT_VARIABLE = "NRL_HUB_PROBE_S"
"""Environment variable with the time limit, in seconds, for answers of the hub."""
_TIMEOUT_S = 3.0

MODEL_FILE = "config.json"
TOKENIZER_FILE = "tokenizer_config.json"


def check_reachable(key: str, name: str, file: str = MODEL_FILE) -> None:
    """Refuse a model that is neither a folder nor available from the hub.

    Args:
        key: configuration key, for messages.
        name: folder or hub id.
        file: file to look for. A model must have `MODEL_FILE`, but a tokenizer need not have `TOKENIZER_FILE`.

    Raises:
        ConfigError: no model can be loaded under this name.
    """
    given = f"{key}={name!r}"
    folder = Path(name).expanduser()
    if folder.is_dir():
        if file == MODEL_FILE and not (folder / file).is_file():
            raise ConfigError(f"{given} is a folder without {file}, so it holds no model.")
        return
    repository, commit = pinned(name) or (name, None)
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise ConfigError(
            f"{given} is neither an existing folder nor a hub id such as owner/name or owner/name@COMMIT, with the 40 "
            f"digits of a commit.{library_model_hint(name)}"
        ) from None
    if try_to_load_from_cache(repository, file, revision=commit) is not None:
        return
    trouble = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _ask_hub(repository, file, commit)
    if trouble is not None:
        raise ConfigError(
            f"{given} is not a folder and not in the cache of the hub, and {trouble}.{library_model_hint(name)}"
        )


def _ask_hub(name: str, file: str, commit: str | None) -> str | None:
    """Return the reason why a file of a repository cannot be downloaded, or None if it can."""
    seconds = float(os.environ.get(TIMEOUT_VARIABLE, _TIMEOUT_S))
    answer = [f"the hub at {constants.ENDPOINT} gave no answer in {seconds:g} s ({TIMEOUT_VARIABLE})"]
    found = threading.Event()

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, file, revision=commit), timeout=seconds)
        except EntryNotFoundError:
            answer[:] = [f"its repository has no {file}"] if file == MODEL_FILE else []
        except GatedRepoError:
            answer[:] = ["its repository is gated: accept its terms on the hub and run `hf auth login`"]
        except RepositoryNotFoundError:
            answer[:] = [f"the hub at {constants.ENDPOINT} has no such model, or only for who runs `hf auth login`"]
        except Exception as error:  # the hub's HTTP library depends on its version
            answer[:] = [f"the hub at {constants.ENDPOINT} could not be reached ({error})"]
        else:
            answer.clear()
        found.set()

    # # The timeout of a request does not include the DNS look-up, which may take longer.
    threading.Thread(target=ask, daemon=True).start()
    found.wait(seconds + 0.5)
    return answer[0] if answer else None
