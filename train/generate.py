"""The generation: `python -m train.generate RUN_DIR --prompt TEXT` continues a text and writes it as it comes."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import tyro

from train import flags
from train.config import Platform
from train.flags import InputError, MeshShape

_ONE_DEVICE = MeshShape()


@dataclasses.dataclass(frozen=True)
class Settings:
    """Continue a text with the newest checkpoint of a run, or with a Hugging Face model."""

    run_dir: Annotated[tyro.conf.Positional[Path], flags.parsed(Path, "RUN_DIR")]
    """Folder of a training run, or one with config.json, safetensors and tokenizer.json."""
    prompt: Annotated[str | None, flags.parsed(str, "TEXT")] = None
    """Beginning of the text; "" begins one."""
    prompt_file: Annotated[Path | None, flags.parsed(Path, "FILE")] = None
    """File in UTF-8 that holds it instead."""
    max_tokens: Annotated[int, flags.whole] = 256
    """Most tokens that are generated; the end of a text comes before."""
    temperature: Annotated[float, flags.at_least_zero] = 1.0
    """By which logits are divided; 0 takes the likeliest token."""
    top_k: Annotated[int | None, flags.whole] = None
    """Draw from the N likeliest tokens only."""
    top_p: Annotated[float | None, flags.fraction] = None
    """Draw from as few of the likeliest tokens as have this probability together."""
    seed: Annotated[int, flags.whole_or_zero] = 0
    """Decides what is drawn."""
    mesh: Annotated[MeshShape, flags.parsed(MeshShape.parse, "data=N,seq=N,tensor=N")] = _ONE_DEVICE
    """Devices per axis, over which weights, prompt and cache are spread; need not be those of the training."""
    platform: Annotated[Platform, flags.choice(*get_args(Platform))] = "auto"
    """As of the training."""

    @property
    def text(self) -> str:
        """The prompt.

        Raises:
          InputError: there is none, or there are two, or it is no UTF-8.
        """
        if (self.prompt is None) == (self.prompt_file is None):
            raise InputError("--prompt, --prompt-file: one of them")
        try:
            text = self.prompt_file.read_text("utf-8") if self.prompt_file else self.prompt or ""
            text.encode()
        except OSError as error:
            raise InputError(f"--prompt-file {self.prompt_file}: a readable file ({error.strerror})") from None
        except UnicodeError as error:
            raise InputError(f"--prompt{'-file' if self.prompt_file else ''}: text in UTF-8 ({error})") from None
        return text


def main(arguments: Sequence[str]) -> int:
    """Generates as the arguments say and returns the exit code."""
    try:
        settings = flags.cli(Settings, arguments, "python -m train.generate")
        generate(settings, settings.text)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def generate(settings: Settings, text: str) -> None:
    """Writes what follows the text to stdout, and what the model is and its speed to stderr.

    Raises:
      InputError: RUN_DIR holds no model, or the mesh or the prompt do not fit it.
    """
    # Not above, so that a wrong argument need not wait for JAX.
    from train.decode import Choice, Decoder, restore
    from train.report import say

    model = restore(settings.run_dir, settings.mesh, settings.platform)
    prompt = model.tokenizer.prompt(text)
    if not len(prompt):
        raise InputError("--prompt '': a text, as nothing begins one for this tokenizer")
    if prompt.max() >= model.llama.vocab_size:
        raise InputError(f"--prompt: tokens below the model's vocabulary of {model.llama.vocab_size}")
    say(f"model     {model.origin}, {model.llama.num_parameters:,} parameters; {len(prompt):,} tokens of prompt")
    decoder = Decoder(model.create_model, model.mesh, Choice(settings.temperature, settings.top_k, settings.top_p))
    text_of, times = model.tokenizer.stream(), []
    for token in decoder(model.params, prompt, settings.max_tokens, seed=settings.seed):
        times.append(time.perf_counter())
        if token in model.tokenizer.end:
            break
        print(text_of(token), end="", flush=True)
    print()
    # The first token comes out of the prompt, and the second is compiled for.
    speed = f", {(len(times) - 2) / (times[-1] - times[1]):,.1f} tokens/s" if len(times) > 2 else ""
    say(f"generated {len(times):,} tokens{speed}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
