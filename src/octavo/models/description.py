"""The description of a model whose weights need not be here: of its files, or of a name.

For plans. What an engine loads is opened by `models.loader.describe`.
"""

from pathlib import Path

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.safetensors import SAFETENSORS
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelNotFoundError, nearest
from octavo.models import hub
from octavo.models.config import from_config, load_spec
from octavo.models.files import EMBEDDED, fetch_description, is_hub_id, is_readable, resolve
from octavo.models.folder import CONFIG
from octavo.models.known import CONFIGS
from octavo.models.loader import Description, describe, described


def describe_alone(config: EngineConfig) -> Description:
    """As `models.loader.describe`, without the weights where they are not here.

    Nothing is downloaded but the description of a Hugging Face id. Raises as `describe`.
    """
    model, path = config.model, Path(config.model).expanduser()
    if model in CONFIGS and not path.exists():
        spec = from_config(CONFIGS[model], source=f"the known model {model}")
        return described(config, _without_weights(Path(model)), spec)
    if is_readable(path) and path.name == CONFIG:
        path = path.parent
    if (path / CONFIG).is_file():
        return _of_folder(config, path)
    if path.exists() or model in EMBEDDED:
        return describe(config)
    if not is_hub_id(model):
        known = [*EMBEDDED, *CONFIGS]
        hint = nearest(model, known) or f"; known: {', '.join(known)}"
        raise ModelNotFoundError(
            f"model {model!r}: no such file or folder, and no model of that name{hint}; a Hugging "
            "Face id has the form 'owner/name'"
        )
    repo, file = hub.split_id(model)
    if file is not None:
        raise ConfigError(
            f"model {model!r} is one file of a repository, and a plan fetches no weights: fetch it "
            f"with octavo pull {model}, and plan the .gguf file, or name the repository alone"
        )
    return _of_folder(config, fetch_description(repo, config.revision))


def _of_folder(config: EngineConfig, folder: Path) -> Description:
    """Of a folder with a config.json; with its weights, if all of them are here."""
    try:
        files = resolve(str(folder))
    except ConfigError:  # none, only some, or of a kind that is not read
        checkpoint = _without_weights(folder)
    else:
        checkpoint = files.open()
    return described(config, checkpoint, load_spec(checkpoint))


def _without_weights(root: Path) -> Checkpoint:
    return Checkpoint(root, (), SAFETENSORS, {}, {})
