"""Publish an exported folder on the Hugging Face Hub: `thinwire export RUN OUT --push NAME`."""

from __future__ import annotations

from pathlib import Path


def check_push(name: str) -> None:
    """Refuse what cannot be pushed to before anything is made: no client, or a name that is none."""
    try:
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError as error:
        raise ValueError(
            f"--push {name} needs the package huggingface_hub, which cannot be imported ({error}); install it, in the checkout, with: "
            "pip install -c constraints.txt -e '.[hf]'"
        ) from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"--push {name} is no name on the Hub ({error}); write USER/NAME") from None


def push_folder(folder: Path, name: str) -> str:
    """Put all files of a folder into a repository of the Hub, which is made private if it is not there; return what to say."""
    from huggingface_hub import HfApi  # not at the top: nothing else of an export needs it
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        place = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export of thinwire")
    except (HfHubHTTPError, OSError) as error:
        lines = str(error).splitlines()
        raise ValueError(
            f"{folder} was written, but not pushed to {name}: {lines[0] if lines else type(error).__name__}; log in with `hf auth login`, "
            f"then: hf upload {name} {folder}"
        ) from error
    return f"pushed to {place}"
