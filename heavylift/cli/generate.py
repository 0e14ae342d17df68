"""`heavylift generate`: one greedy answer of a Hugging Face model folder, on the GPU if there is one.

Left out: sampling, batches, models larger than one device (this is to look at a result, not to serve it).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heavylift.config.model_folder import check_tokenizer, read_config, read_weights
from heavylift.errors import UserError, first_line

if TYPE_CHECKING:
    import torch


def run_generate(
    model_dir: Path,
    prompt: str,
    max_new_tokens: int = 64,
    tokenizer_dir: Path | None = None,
    chat_template: Path | None = None,
    trust_remote_code: bool = False,
) -> str:
    """The model's answer to `prompt` as text, at most `max_new_tokens` tokens, special tokens removed.

    With a chat template the prompt is one user turn, else plain text to continue. Raises UserError if the folder,
    its weights or the tokenizer are not usable.
    """
    _check(model_dir, tokenizer_dir or model_dir, chat_template, prompt)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is given: nothing to look up
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            tokenizer_dir or model_dir, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises nearly anything for a broken tokenizer
        raise UserError(f"{tokenizer_dir or model_dir}: the tokenizer cannot be read: {first_line(error)}") from None
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    model = _load_model(model_dir, device, trust_remote_code)
    inputs = _encode(tokenizer, prompt).to(device)
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=_end_ids(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)).strip()


def _check(model_dir: Path, tokenizer_dir: Path, chat_template: Path | None, prompt: str) -> None:
    if not prompt.strip():
        raise UserError("PROMPT: expected a question, got an empty text")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError("PROMPT: expected UTF-8 text, got bytes that are not")  # as Python keeps them
    for folder in dict.fromkeys((model_dir, tokenizer_dir)):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; expected a Hugging Face model folder such as runs/demo/model")
    read_config(model_dir, "MODEL_DIR")
    read_weights(model_dir)
    check_tokenizer(tokenizer_dir, "--tokenizer", needs_template=False)
    if chat_template is not None and not chat_template.is_file():
        raise UserError(f"{chat_template}: no such file; expected a Jinja chat template for --chat-template")


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}; change --chat-template") from None


def _load_model(folder: Path, device: torch.device, trust_remote_code: bool) -> Any:
    """The model in eval mode: bfloat16 on a GPU, float32 on a CPU (few have fast bfloat16)."""
    import torch
    import transformers

    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise UserError(f"{folder}: the model cannot be loaded: {first_line(error)}") from None
    model, info = loaded
    if info["missing_keys"]:
        # transformers would go on with random weights there
        missing = sorted(info["missing_keys"])
        raise UserError(f"{folder}: {len(missing)} tensors are missing: {', '.join(missing[:4])}; get the model anew")
    # sampling settings that come with the model only make noise in a greedy answer
    for name in ("temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    return model.eval().to(device)


def _encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids int64 [1, S] of the prompt, with the opening of the assistant's turn where there is a template."""
    import torch

    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # Jinja's own errors, and whatever a template runs into
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"the chat template fails on PROMPT: {reason}; give another by --chat-template") from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them already
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise UserError("PROMPT: the tokenizer makes no token of it; ask something else")
    return torch.tensor([ids], dtype=torch.int64)


def _end_ids(model: Any, tokenizer: Any) -> list[int] | None:
    """Every token that ends a turn: the model's and the tokenizer's may differ after fine-tuning."""
    own = model.generation_config.eos_token_id
    ids = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
    return sorted(ids) or None
