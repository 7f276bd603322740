"""The model folder: what is read, what is refused (in one line each), and what is sent to nodes.

Run: python -m pytest tests/test_coordinator_checkpoint.py
"""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

import quant
import qwen
from coordinator import Checkpoint, FileShrunk, StartupError, resolve_model

HUB = sys.modules[Checkpoint.__module__]  # where snapshot_download and HfApi are looked up
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
FP16 = qwen.WeightFormat("fp16", 64, "fp16")
INT8 = qwen.WeightFormat("int8", 64, "fp16")
INT4 = qwen.WeightFormat("int4", 32, "fp16")


def make_tensors(config=CONFIG, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random weights under the names that the checkpoints on the hub have, written out by hand."""
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for name, out_features in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{layer}self_attn.{name}.weight"] = (out_features, hidden)
            shapes[f"{layer}self_attn.{name}.bias"] = (out_features,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inter)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_model(folder, tensors=None, config=CONFIG, shards=None):
    """A model folder; shards: None for one file, or so many files and an index."""
    tensors = make_tensors(config) if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[shard::shards], file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def refusal(folder) -> str:
    """The one line that opening the folder ends in."""
    with pytest.raises(StartupError) as error:
        Checkpoint(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    assert len(message) < 1000
    return message


# ----------------------------------------------------------------------------------------------------------------------
# What is read
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [None, 1, 3])
def test_tensors_are_those_of_the_files(tmp_path, shards, tied, dtype):
    config = {**CONFIG, "tie_word_embeddings": tied}
    tensors = make_tensors(config, dtype)
    checkpoint = Checkpoint(write_model(tmp_path / "model", tensors, config, shards))
    assert checkpoint.config == qwen.Config.from_checkpoint(config)
    assert checkpoint.raw_config == config
    for name, tensor in tensors.items():
        assert checkpoint.tensor(name).dtype == dtype
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_a_file_that_became_shorter_is_not_read_any_more(tmp_path):
    """Reading mapped bytes that are gone is a SIGBUS: without the check this test ends the whole run."""
    checkpoint = Checkpoint(write_model(tmp_path / "model", shards=2))
    ends = checkpoint.ends(FP16)
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight")
    for file in (tmp_path / "model").glob("*.safetensors"):
        os.truncate(file, 100)
    reads = [lambda name=name: checkpoint.tensor(name).sum() for name in names]
    reads += [
        lambda: ends.embed([49]),
        lambda: list(checkpoint.stored_parts(qwen.stored_tensors(checkpoint.config, 1, 2, FP16), FP16)),
    ]
    for read in reads:
        with pytest.raises(FileShrunk, match="has 100 now.*start the coordinator again"):
            read()
    assert torch.isfinite(ends.logits(torch.ones(1, 16))).all()


def test_a_file_that_another_one_replaced_stays_what_it_was(tmp_path):
    tensors = make_tensors()
    checkpoint = Checkpoint(write_model(tmp_path / "model", tensors))
    (tmp_path / "new").write_bytes(b"short")
    os.replace(tmp_path / "new", tmp_path / "model" / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_mixed_dtypes(tmp_path):
    tensors = make_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    assert Checkpoint(write_model(tmp_path / "model", tensors)).tensor("model.norm.weight").dtype == torch.float32


def test_a_redundant_head_in_a_tied_checkpoint_is_not_used(tmp_path):
    tied = {**CONFIG, "tie_word_embeddings": True}
    tensors = make_tensors()  # with a head that differs from the embedding
    ends = Checkpoint(write_model(tmp_path / "model", tensors, tied)).ends(qwen.WeightFormat("fp16", 64, "fp32"))
    expected = torch.nn.functional.rms_norm(torch.ones(1, 16), (16,), tensors["model.norm.weight"].float(), 1e-6)
    expected = expected @ tensors["model.embed_tokens.weight"].float().T
    assert torch.allclose(ends.logits(torch.ones(1, 16)), expected, atol=1e-5)


def test_tables_of_old_checkpoints_are_ignored(tmp_path):
    tensors = {**make_tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    Checkpoint(write_model(tmp_path / "model", tensors))


def test_a_single_file_comes_before_an_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing.safetensors"}}')
    Checkpoint(folder)


def test_files_may_be_links_to_elsewhere(tmp_path, folder):
    """The hub's cache keeps the files themselves in another folder."""
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    Checkpoint(folder)


MEASURE = """
import sys, torch
from pathlib import Path
from coordinator import Checkpoint

def anonymous():
    return sum(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous:")) // 1024

checkpoint = Checkpoint(Path(sys.argv[1]))
checkpoint.tensor("model.norm.weight").float().sum()  # whatever torch sets up at first use
before = anonymous()
tensor = checkpoint.tensor("model.embed_tokens.weight")
total = sum(tensor[start : start + 4096].sum(dtype=torch.float32).item() for start in range(0, len(tensor), 4096))
print(anonymous() - before, total, tensor.data_ptr() == checkpoint.tensor("model.embed_tokens.weight").data_ptr())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
def test_a_tensor_is_a_view_of_the_mapped_file(tmp_path):
    """64 MiB are read in full; the process's own memory does not grow by them."""
    config = {**CONFIG, "vocab_size": 1 << 21, "tie_word_embeddings": True}
    tensors = {**make_tensors({**CONFIG, "tie_word_embeddings": True})}
    tensors["model.embed_tokens.weight"] = torch.ones(1 << 21, 16, dtype=torch.bfloat16)
    write_model(tmp_path / "model", tensors, config)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    grown_mb, total, same = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
    assert float(total) == 1 << 25
    assert int(grown_mb) < 16
    assert same == "True"


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"1" * 10_000, "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
        (b"{}", "architecture none"),
    ],
)
def test_broken_config(folder, content, says):
    (folder / "config.json").write_bytes(content)
    assert says in refusal(folder)


def test_config_is_a_folder(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "has no config.json" in refusal(folder)


# The details are tested with qwen.Config; here, that they end in one line that names the file.
@pytest.mark.parametrize(
    "change, says",
    [
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}, "Qwen3_5ForConditional"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "Qwen2MoeForCausalLM"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "already quantized (awq)"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": 10**30}, "vocab_size"),
    ],
)
def test_what_cannot_be_run(folder, change, says):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    message = refusal(folder)
    assert says in message
    assert "config.json" in message


def test_a_window_that_is_not_used_is_fine(folder):
    unused = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **unused}))
    Checkpoint(folder)


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    tensors = make_tensors()
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(4)
    message = refusal(write_model(tmp_path / "model", tensors))
    assert "missing: 1 (model.layers.1.self_attn.k_proj.bias)" in message
    assert "unexpected: 1 (model.layers.1.self_attn.q_norm.weight)" in message


def test_long_lists_are_cut(tmp_path):
    config = {**CONFIG, "num_hidden_layers": 40}
    assert "missing: 456 (" in (message := refusal(write_model(tmp_path / "model", make_tensors(), config)))
    assert "and 448 more" in message
    assert "unexpected: none" in message


def test_fewer_layers_than_tensors(tmp_path):
    config = {**CONFIG, "num_hidden_layers": 1}
    assert "missing: none; unexpected: 12 (" in refusal(write_model(tmp_path / "model", make_tensors(), config))


def test_an_untied_checkpoint_needs_its_head(tmp_path):
    tensors = make_tensors({**CONFIG, "tie_word_embeddings": True})
    assert "missing: 1 (lm_head.weight)" in refusal(write_model(tmp_path / "model", tensors))


@pytest.mark.parametrize(
    "name, tensor, says",
    [
        ("model.norm.weight", torch.ones(17), "model.norm.weight is F32 [17], config.json asks for [16]"),
        ("lm_head.weight", torch.ones(16, 50), "lm_head.weight is F32 [16, 50], config.json asks for [50, 16]"),
        ("model.norm.weight", torch.ones(16, dtype=torch.int32), "model.norm.weight is I32 [16]"),
        ("model.norm.weight", torch.ones(16, dtype=torch.float64), "model.norm.weight is F64 [16]"),
        ("lm_head.weight", torch.ones(50, 16, dtype=torch.int8), "in BF16, F16, F32"),
        ("lm_head.weight", torch.ones(50, 16).to(torch.float8_e4m3fn), "lm_head.weight is F8_E4M3"),
    ],
)
def test_wrong_shapes_and_dtypes(tmp_path, name, tensor, says):
    assert says in refusal(write_model(tmp_path / "model", {**make_tensors(), name: tensor}))


@pytest.mark.parametrize("cut", ["in the data", "in the header", "in the length", "to nothing", "text"])
def test_a_truncated_file(folder, cut):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    keep = {"in the data": len(data) - 1, "in the header": 100, "in the length": 5, "to nothing": 0, "text": 0}[cut]
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" if cut == "text" else data[:keep])
    message = refusal(folder)
    assert "model.safetensors: not a complete safetensors file" in message
    assert "download it again" in message


def test_a_truncated_shard_is_named(tmp_path):
    folder = write_model(tmp_path / "model", shards=3)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert "model-00002-of-00003.safetensors: not a complete safetensors file" in refusal(folder)


def test_missing_shards_are_listed(tmp_path):
    folder = write_model(tmp_path / "model", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "of 3 shards, missing are 1 (model-00002-of-00003.safetensors)" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".", 5, None])
def test_an_index_that_names_a_file_outside_the_folder(tmp_path, name):
    folder = write_model(tmp_path / "model", shards=2)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(folder)
    assert "is not a file name" in message or "missing are" in message


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"])
def test_a_broken_index(tmp_path, index):
    folder = write_model(tmp_path / "model", shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4_0.gguf", "consolidated.00.pth"])
def test_other_weight_files_are_named(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    assert f"{name} is not supported, only safetensors are" in refusal(folder)


def test_a_folder_with_only_a_tokenizer(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    assert "has no config.json" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Where the folder comes from
# ----------------------------------------------------------------------------------------------------------------------


def resolve_refusal(model, revision=None, cache=None) -> str:
    with pytest.raises(StartupError) as error:
        resolve_model(model, revision, cache)
    message = str(error.value)
    assert "\n" not in message
    assert f"--model {model}: " in message
    return message


def test_a_local_folder(folder, monkeypatch):
    assert resolve_model(str(folder), None, None) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model", None, None).resolve() == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/model", None, None) == folder


@pytest.mark.parametrize("model", ["/no/such", "./no", "../no", "~/no", "~nobody-here/no", "a\\b", "a/b/c"])
def test_paths_are_not_asked_of_the_hub(model, hub):
    assert "no such folder; give a folder with config.json, or a hub id" in resolve_refusal(model)
    assert hub.asked == []


def test_a_file_is_no_folder(folder, hub):
    assert "no such folder" in resolve_refusal(str(folder / "config.json"))
    assert hub.asked == []


@pytest.fixture
def hub(monkeypatch):
    """Takes the place of huggingface_hub; `answer` and `download` are exceptions to raise or values to return."""

    class Hub:
        answer, download, asked = None, "/folder", []

        def model_info(self, model, **options):
            Hub.asked.append((model, options))
            return give(Hub.answer)

        @staticmethod
        def snapshot_download(model, **options):
            Hub.asked.append((model, options))
            return give(Hub.download)

    def give(value):
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr(HUB, "HfApi", Hub)
    monkeypatch.setattr(HUB, "snapshot_download", Hub.snapshot_download)
    return Hub


def wanted(files, options):
    from huggingface_hub.utils import filter_repo_objects

    return set(
        filter_repo_objects(files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"])
    )


def test_only_the_needed_files_are_asked_for(hub):
    assert str(resolve_model("Qwen/Qwen2.5-0.5B", "v1", "/cache")) == "/folder"
    (_, asked), (model, options) = hub.asked
    assert asked["revision"] == "v1" and 0 < asked["timeout"] <= 30
    assert model == "Qwen/Qwen2.5-0.5B"
    assert (options["revision"], options["cache_dir"], options["local_files_only"]) == ("v1", "/cache", False)
    needed = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja",
    }  # fmt: skip
    others = {
        "pytorch_model.bin", "model.gguf", "README.md", "LICENSE", "modeling_qwen.py", "onnx/model.onnx",
        "onnx/config.json", "adapter/adapter_model.safetensors", "tf_model.h5", "figures/a.png", ".gitattributes",
    }  # fmt: skip
    assert wanted(needed | others, options) == needed


def offline_error():
    """What huggingface_hub 2 raises without a network, word for word."""
    return LocalEntryNotFoundError(
        "Got: ConnectError: [Errno -2] Name or service not known\nAn error happened while trying to locate the files "
        "on the Hub, and we cannot find the appropriate snapshot folder for the specified revision on the local disk."
    )


class ConnectError(Exception):
    """The HTTP client's errors are no OSErrors."""


@pytest.mark.parametrize(
    "answer, download, says",
    [
        (ConnectError("[Errno -2] Name or service not known"), offline_error(), "ConnectError: [Errno -2] Name or"),
        (TimeoutError("timed out"), offline_error(), "TimeoutError: timed out"),
        (ConnectionError("Cannot reach https://hf.co: offline mode is enabled."), offline_error(), "offline mode"),
        (None, offline_error(), "LocalEntryNotFoundError: Got: ConnectError"),
        (None, OSError(28, "No space left on device"), "No space left on device"),
        (None, ConnectError("502 Bad gateway\nFor more information"), "502 Bad gateway For more information"),
        (None, RuntimeError("Data processing error: CAS service error"), "CAS service error"),
    ],
)
def test_no_network(hub, answer, download, says):
    hub.answer, hub.download = answer, download
    message = resolve_refusal("Qwen/Qwen2.5-0.5B")
    assert says in message
    assert "give the path of a local folder" in message
    assert len(message) < 600


def test_without_network_the_cache_is_used(hub):
    hub.answer = ConnectError("unreachable")
    assert str(resolve_model("Qwen/Qwen2.5-0.5B", None, None)) == "/folder"
    assert hub.asked[-1][1]["local_files_only"] is True


def test_a_gated_model_says_so(hub):
    from types import SimpleNamespace

    response = SimpleNamespace(headers={}, request=None, status_code=401)
    hub.answer, hub.download = GatedRepoError("Access to model a/b is restricted.", response=response), offline_error()
    assert "GatedRepoError: Access to model a/b is restricted." in resolve_refusal("a/b")


@pytest.mark.parametrize("model", ["a b/c", "owner/--", "x" * 300, "owner/name.git"])
def test_names_that_cannot_be_hub_ids(model):
    assert "neither a folder here nor a hub id (owner/name)" in resolve_refusal(model)


def test_the_real_library_without_a_network(monkeypatch, tmp_path):
    """The hub at a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    assert "cannot be downloaded from the hub" in resolve_refusal("owner/name", cache=str(tmp_path))


def test_a_hub_that_never_answers_is_given_up(monkeypatch, tmp_path):
    """As behind a firewall that drops what is sent: huggingface_hub alone would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(HUB, "HUB_ANSWER_S", 0.2)
        messages = []
        thread = threading.Thread(
            target=lambda: messages.append(resolve_refusal("owner/name", cache=str(tmp_path))), daemon=True
        )
        thread.start()
        thread.join(60)
    assert messages and "Timeout" in messages[0]


# ----------------------------------------------------------------------------------------------------------------------
# What is sent
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [FP16, INT8, INT4, qwen.WeightFormat("fp16", 64, "fp32")])
def test_stored_parts_are_those_of_quant(folder, weights):
    checkpoint = Checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    stored = qwen.stored_tensors(checkpoint.config, 0, 2, weights)
    sent = list(checkpoint.stored_parts(stored, weights))
    assert [entry for entry, _ in sent] == stored
    assert {entry.source for entry in stored} == {name for name in tensors if ".layers." in name}
    for entry, tensor in sent:
        source = tensors[entry.source]
        if source.dim() == 1:
            expected = source.float()
        else:
            expected = quant.quantize(source, weights.quant, weights.group_size, weights.dtype)[entry.suffix]
        assert tensor.is_contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, qwen.TORCH_DTYPES[entry.dtype])
        assert torch.equal(tensor, expected), entry.name


def test_a_few_wanted_tensors_are_enough(folder):
    """A node asks for what its cache lacks: single parts, in the order of the list."""
    checkpoint = Checkpoint(folder)
    stored = qwen.stored_tensors(checkpoint.config, 0, 2, INT8)
    everything = {entry.name: tensor for entry, tensor in checkpoint.stored_parts(stored, INT8)}
    some = stored[1::3]
    for entry, tensor in checkpoint.stored_parts(some, INT8):
        assert torch.equal(tensor, everything[entry.name])


@pytest.mark.parametrize(
    "name, value, weights",
    [
        ("model.layers.1.mlp.up_proj.weight", 1e6, FP16),
        ("model.layers.1.mlp.up_proj.weight", float("nan"), INT8),
        ("model.layers.1.mlp.up_proj.weight", float("inf"), INT4),
        ("model.layers.1.self_attn.q_proj.bias", float("nan"), FP16),
        ("model.layers.1.input_layernorm.weight", float("inf"), INT8),
    ],
)
def test_values_that_a_stored_form_cannot_hold_are_refused_by_name(tmp_path, name, value, weights):
    tensors = make_tensors()
    tensors[name].view(-1)[3] = value
    checkpoint = Checkpoint(write_model(tmp_path / "model", tensors))
    with pytest.raises(ValueError, match=f"{name}: .*has") as error:
        list(checkpoint.stored_parts(qwen.stored_tensors(checkpoint.config, 0, 2, weights), weights))
    assert "\n" not in str(error.value)


def test_a_head_that_cannot_be_stored_ends_the_start(tmp_path):
    tensors = make_tensors()
    tensors["lm_head.weight"][7, 3] = float("nan")
    checkpoint = Checkpoint(write_model(tmp_path / "model", tensors))
    for weights in (FP16, INT4):
        with pytest.raises(StartupError, match="lm_head.weight: the weight has"):
            checkpoint.ends(weights)


def keys_of(folder, weights):
    checkpoint = Checkpoint(folder)
    return {e.name: checkpoint.key(e, weights) for e in qwen.stored_tensors(checkpoint.config, 0, 2, weights)}


def test_keys_are_equal_for_equal_bytes(tmp_path, folder):
    """In another folder, sharded, asked for in another order, in another process: the same bytes have the same key."""
    keys = keys_of(folder, INT8)
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys.values())
    assert len(set(keys.values())) == len(keys)
    assert keys_of(write_model(tmp_path / "sharded", load_file(folder / "model.safetensors"), shards=3), INT8) == keys

    tensors = make_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()
    keys = keys_of(write_model(tmp_path / "equal", tensors), INT8)
    assert keys["model.layers.0.mlp.up_proj.weight.q"] == keys["model.layers.1.mlp.up_proj.weight.q"]


def test_keys_differ_by_bytes_and_by_recipe(tmp_path, folder, monkeypatch):
    name = "model.layers.0.mlp.up_proj.weight"
    seen = {}

    def add(what, keys):
        for suffix in ("", ".q", ".scale", ".zero"):
            if name + suffix in keys:
                assert keys[name + suffix] not in seen, (what, seen[keys[name + suffix]])
                seen[keys[name + suffix]] = what + suffix

    add("fp16", keys_of(folder, FP16))
    add("bf16", keys_of(folder, qwen.WeightFormat("fp16", 64, "bf16")))
    add("int8", keys_of(folder, INT8))
    add("int4", keys_of(folder, INT4))
    add("int4, larger groups", keys_of(folder, qwen.WeightFormat("int4", 64, "fp16")))
    tensors = make_tensors()
    tensors[name][0, 0] += 1
    add("one value", keys_of(write_model(tmp_path / "changed", tensors), INT4))
    tensors = make_tensors()
    tensors[name] = tensors[name].view(torch.float16)
    add("the same bytes in another dtype", keys_of(write_model(tmp_path / "dtype", tensors), INT4))
    monkeypatch.setattr(quant, "ALGORITHM_VERSION", quant.ALGORITHM_VERSION + 1)
    add("a newer algorithm", keys_of(folder, INT4))


def test_a_source_is_hashed_once(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    entries = [e for e in qwen.stored_tensors(checkpoint.config, 0, 1, INT4) if e.source.endswith("up_proj.weight")]
    reads = []
    tensor = checkpoint.tensor
    monkeypatch.setattr(checkpoint, "tensor", lambda name: reads.append(name) or tensor(name))
    keys = {checkpoint.key(entry, INT4) for entry in entries}
    assert (len(keys), reads) == (3, ["model.layers.0.mlp.up_proj.weight"])


def test_keys_cover_the_calibration_and_do_not_wait_for_it(folder, monkeypatch):
    """A warm start of int4 asks for keys and converts nothing: it must not run the model."""
    plain, checkpoint = keys_of(folder, INT4), Checkpoint(folder)
    runs = []
    measure = checkpoint._measure_importance
    monkeypatch.setattr(checkpoint, "_measure_importance", lambda ids: runs.append(ids) or measure(ids))
    checkpoint.hash_tensors()
    checkpoint.calibrate([1, 2, 3])
    entries = qwen.stored_tensors(checkpoint.config, 0, 2, INT4)
    linears = [entry for entry in entries if entry.suffix]
    keys = {entry.name: checkpoint.key(entry, INT4) for entry in linears}
    assert runs == [] and not set(keys.values()) & set(plain.values())
    parts = {entry.name: part.clone() for entry, part in checkpoint.stored_parts(linears, INT4)}
    assert runs == [[1, 2, 3]] and keys == {entry.name: checkpoint.key(entry, INT4) for entry in linears}
    uncalibrated = {entry.name: part for entry, part in Checkpoint(folder).stored_parts(linears, INT4)}
    assert any(not torch.equal(parts[name], uncalibrated[name]) for name in parts)  # it was there for the first tensor


# ----------------------------------------------------------------------------------------------------------------------
# What the coordinator keeps
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [qwen.WeightFormat("fp16", 64, "fp32"), INT8, INT4])
def test_ends(tmp_path, tied, weights):
    """Embedding and head by hand: as they are, or int8 per row in both quantized modes."""
    config = {**CONFIG, "tie_word_embeddings": tied}
    tensors = make_tensors(config)
    ends = Checkpoint(write_model(tmp_path / "model", tensors, config)).ends(weights)
    embedding = tensors["model.embed_tokens.weight"].float()
    head = embedding if tied else tensors["lm_head.weight"].float()
    if weights.quant != "fp16":
        embedding, head = ((m / (s := m.abs().amax(dim=1, keepdim=True) / 127)).round() * s for m in (embedding, head))
    assert torch.allclose(ends.embed([3, 49, 3]), embedding[[3, 49, 3]], atol=1e-6)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    normed = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * tensors["model.norm.weight"].float()
    expected = normed @ head.T
    error = (ends.logits(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= (1e-5 if weights.quant == "fp16" else 1e-2)  # int8: a kernel may take its activations in bf16


def test_the_embedding_stays_in_the_file(folder):
    checkpoint = Checkpoint(folder)
    ends = checkpoint.ends(FP16)
    assert ends.embed_tokens.tensor.data_ptr() == checkpoint.tensor("model.embed_tokens.weight").data_ptr()
