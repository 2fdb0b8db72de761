"""Pulling models: what is fetched, what is refused, and what a pull that broke off left."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from appliance.checkpoints.pull import pull
from appliance.checkpoints.safetensors import verify_sums
from appliance.checkpoints.sources import Progress, find_source
from appliance.cli.main import cli
from appliance.errors import CheckpointError, PullError

Make = Callable[..., Path]
FILES = {"config.json", "model.safetensors", "tokenizer.json"}
PULLED = FILES | {".origin"}


@pytest.fixture
def source(fake_checkpoint: Make) -> Path:
    return fake_checkpoint("tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def told() -> list[Progress]:
    return []


def names(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def packed(source: Path, kind: str, top: str = "") -> Path:
    """An archive of the files of a directory, below `top`."""
    path = source.with_name(f"packed{kind}")
    if kind == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names(source):
                archive.write(source / name, top + name)
        return path
    with tarfile.open(path, "w" if kind == ".tar" else "w:gz") as archive:
        for name in names(source):
            archive.add(source / name, top + name)
    return path


def test_a_directory_is_copied(source: Path, folder: Path, told: list[Progress]) -> None:
    """What belongs to a checkpoint, also below; the rest is told of. Nothing else is left."""
    (source / "pytorch_model.bin").write_bytes(b"x")
    (source / ".cache").mkdir()
    (source / ".cache" / "x.json").write_text("{}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")

    pulled = pull(str(source), folder, "org/tiny:1", tell=told.append)

    assert (pulled.name, pulled.path) == ("org/tiny:1", folder / "org--tiny:1")
    assert names(pulled.path) == PULLED | {"1_Pooling/config.json"}
    assert pulled.entry.parameters == 512 * 512
    assert Progress("left out", "pytorch_model.bin") in told
    assert told[-1] == Progress("verifying")
    assert [path.name for path in folder.iterdir()] == ["org--tiny:1"]


def test_weights_of_a_kind_that_is_not_served_are_not_fetched(
    fake_checkpoint: Make, folder: Path, told: list[Progress]
) -> None:
    source = fake_checkpoint("packed", quantization_config={"quant_method": "fp8"})

    with pytest.raises(CheckpointError, match=r"weights are quantized \(fp8: "):
        pull(str(source), folder, tell=told.append)

    assert {progress.file for progress in told} == {"config.json"}
    told.clear()
    modelopt = fake_checkpoint("modelopt")
    (modelopt / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"quantized \(hf_quant_config.json\), .*; take the"):
        pull(str(modelopt), folder, tell=told.append)
    assert {progress.file for progress in told} == {"config.json", "hf_quant_config.json"}


@pytest.mark.parametrize("kind", [".tar", ".tar.gz", ".tgz", ".zip"])
@pytest.mark.parametrize("top", ["", "inner/"])
def test_an_archive_is_unpacked(
    source: Path, folder: Path, told: list[Progress], kind: str, top: str
) -> None:
    """Called as it is; one folder around everything is not kept."""
    pulled = pull(str(packed(source, kind, top)), folder, tell=told.append)

    assert pulled.path == folder / "packed"
    assert names(pulled.path) == PULLED
    for name in FILES:
        assert (pulled.path / name).read_bytes() == (source / name).read_bytes()


def test_a_directory_is_used_in_place(source: Path, told: list[Progress]) -> None:
    """Nothing is copied, but everything is verified."""
    pulled = pull(str(source), None, link=True, tell=told.append)

    assert (pulled.name, pulled.path) == ("tiny", source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        pull(str(source), None, link=True, tell=told.append)
    with pytest.raises(PullError, match="in place"):
        pull(str(packed(source, ".zip")), None, link=True, tell=told.append)


@pytest.mark.parametrize("kind", ["", ".tar.gz", ".zip"])
def test_a_pull_goes_on_where_it_stopped(
    source: Path, folder: Path, told: list[Progress], kind: str
) -> None:
    """Files that are there are not fetched again, and half of one is not seen."""
    what = str(packed(source, kind) if kind else source)
    first: list[str] = []

    def break_off(progress: Progress) -> None:
        first.append(progress.file)
        if progress.done_bytes and len(set(first)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(what, folder, "m", tell=break_off)
    assert not (folder / "m").exists()

    pull(what, folder, "m", tell=told.append)

    assert [one.file for one in told if one.status == "present"] == first[:1]
    assert names(folder / "m") == PULLED


def test_another_source_starts_anew(
    source: Path, folder: Path, told: list[Progress], fake_checkpoint: Make
) -> None:
    """What an earlier pull left of another one is not mixed in."""
    other = fake_checkpoint("other")
    (other / "extra.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="truncated"):
        pull(str(other), folder, "m", tell=told.append)

    pull(str(source), folder, "m", tell=told.append)

    assert names(folder / "m") == PULLED
    assert not any(one.status == "present" for one in told)


def test_what_the_source_has_no_more_goes(source: Path, folder: Path, told: list[Progress]) -> None:
    """A pull that goes on has what a new one would."""
    (source / "below").mkdir()
    (source / "below" / "old.json").write_text("{}")
    (source / "old.json").write_text("{}")
    tokenizer = (source / "tokenizer.json").read_bytes()
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        pull(str(source), folder, "m", tell=told.append)
    (source / "tokenizer.json").write_bytes(tokenizer)
    (source / "old.json").unlink()
    (source / "below" / "old.json").unlink()
    (source / "below").rmdir()

    pull(str(source), folder, "m", tell=told.append)

    assert names(folder / "m") == PULLED
    assert not (folder / "m" / "below").exists()
    assert [one.file for one in told if one.status == "present"]


def test_a_name_is_taken_once(source: Path, folder: Path, told: list[Progress]) -> None:
    """What is there stays as it is; two pulls of one name do not mix."""
    pull(str(source), folder, tell=told.append)
    with pytest.raises(PullError, match="is there already"):
        pull(str(packed(source, ".tar")), folder, "tiny", tell=told.append)

    def meanwhile(progress: Progress) -> None:
        with pytest.raises(PullError, match="under way"):
            pull(str(source), folder, "second", tell=told.append)

    pull(str(source), folder, "second", tell=meanwhile)


@pytest.mark.parametrize("kind", ["", ".tar.gz", ".zip"])
def test_what_is_there_is_not_fetched_again(
    source: Path, folder: Path, told: list[Progress], kind: str
) -> None:
    """A pull can be repeated, unless the source or the model is another one meanwhile."""
    digest = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    sums = f"{digest}  config.json\n{digest}  pytorch_model.bin\n"
    (source / "SHA256SUMS").write_text(sums)
    what = packed(source, kind) if kind else source
    first = pull(str(what), folder, "m", tell=told.append)
    told.clear()

    assert pull(str(what), folder, "m", tell=told.append)[:2] == first[:2]

    assert {one.status for one in told} == {"present", "verifying"}
    changed = what if kind else source / "config.json"
    status = changed.stat()
    os.utime(changed, (status.st_atime, status.st_mtime + 10))
    with pytest.raises(PullError, match="is there already"):
        pull(str(what), folder, "m", tell=told.append)
    os.utime(changed, (status.st_atime, status.st_mtime))
    (first.path / "more.json").write_text("{}")
    with pytest.raises(PullError, match="is there already"):
        pull(str(what), folder, "m", tell=told.append)


@pytest.mark.parametrize("name", ["../up", "a b", "-x", "/root"])
def test_a_name_has_to_be_one(source: Path, folder: Path, told: list[Progress], name: str) -> None:
    """Of a model, and inside of the folder."""
    with pytest.raises(PullError, match="cannot be a model's name"):
        pull(str(source), folder, name, tell=told.append)


def test_a_name_cannot_lead_out(source: Path, folder: Path, told: list[Progress]) -> None:
    """Whatever is in it, it is one folder."""
    pulled = pull(str(source), folder, "a/../../b", tell=told.append)

    assert pulled.path == folder / "a--..--..--b"
    assert pulled.path.is_dir()


def test_pickles_are_refused(source: Path, folder: Path, told: list[Progress]) -> None:
    """By name, if there is nothing else."""
    (source / "model.safetensors").rename(source / "pytorch_model.bin")

    with pytest.raises(PullError, match=r"pytorch_model\.bin is a pickle"):
        pull(str(source), folder, tell=told.append)
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(PullError, match=r"no \*\.safetensors file"):
        pull(str(source), folder, tell=told.append)


@pytest.mark.parametrize("member", ["../evil.json", "/evil.json", "a\\..\\evil.json", "new\nline"])
@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_members_that_lead_out_are_refused(
    tmp_path: Path, source: Path, folder: Path, told: list[Progress], member: str, kind: str
) -> None:
    """Before anything is written."""
    path = packed(source, kind)
    if kind == ".zip":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(member, b"{}")
    else:
        with tarfile.open(path, "a") as tar:
            info = tarfile.TarInfo(member)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))

    with pytest.raises(PullError, match="leads out of it"):
        pull(str(path), folder, tell=told.append)

    assert not (tmp_path / "evil.json").exists()
    assert names(folder) == {".packed.part/.origin"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(
    source: Path, folder: Path, told: list[Progress], kind: bytes
) -> None:
    """In archives, which may be anybody's."""
    path = packed(source, ".tar")
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("extra.json")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)

    with pytest.raises(PullError, match=r"its member extra\.json is a link"):
        pull(str(path), folder, tell=told.append)


def test_a_link_in_a_zip_is_refused(source: Path, folder: Path, told: list[Progress]) -> None:
    """The kind of a member is in its attributes."""
    path = packed(source, ".zip")
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("extra.json")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")

    with pytest.raises(PullError, match="is a link"):
        pull(str(path), folder, tell=told.append)


@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_every_member_counts(
    source: Path, folder: Path, told: list[Progress], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories, too: listing them takes time and memory."""
    monkeypatch.setattr("appliance.checkpoints.sources.MAX_FILES", 5)
    path = packed(source, kind)
    if kind == ".zip":
        with zipfile.ZipFile(path, "a") as archive:
            for number in range(3):
                archive.mkdir(f"d{number}")
    else:
        with tarfile.open(path, "a") as tar:
            for number in range(3):
                info = tarfile.TarInfo(f"d{number}")
                info.type = tarfile.DIRTYPE
                tar.addfile(info)

    with pytest.raises(PullError, match="more than 5 members"):
        pull(str(path), folder, tell=told.append)


def tar_header(kind: bytes, nbytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo("extended")
    info.type, info.size = kind, nbytes
    return info


@pytest.mark.parametrize(
    "kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE]
)
@pytest.mark.parametrize(("nbytes", "times"), [(16 << 20, 1), (1 << 10, 20), (-512, 1)])
def test_headers_are_bounded(
    source: Path, folder: Path, told: list[Progress], kind: bytes, nbytes: int, times: int
) -> None:
    """Each, and together: they are read into memory before anybody can look at them."""
    path = packed(source, ".tar")
    with path.open("r+b") as file:
        file.seek(0)
        members = file.read()
        file.seek(0)
        for _ in range(times):
            file.write(tar_header(kind, nbytes).tobuf(tarfile.GNU_FORMAT))
            file.write(bytes(max(nbytes, 0)))
        file.write(members)

    with pytest.raises(PullError, match="is refused: it"):
        pull(str(path), folder, tell=told.append)


def test_long_names_are_none_too_many(source: Path, folder: Path, told: list[Progress]) -> None:
    """Each has a header of its own, which is forgotten with it."""
    path = packed(source, ".tar")
    with tarfile.open(path, "a", format=tarfile.PAX_FORMAT) as tar:
        for number in range(40):
            info = tarfile.TarInfo(f"{'x' * 200}{number}.md")
            tar.addfile(info)

    pull(str(path), folder, tell=told.append)

    assert len([one for one in told if one.status == "left out"]) == 40


@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_a_member_twice_is_refused(
    source: Path, folder: Path, told: list[Progress], kind: str
) -> None:
    """Which of them would it be?"""
    path = packed(source, kind)
    if kind == ".zip":
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("config.json", "{}")
    else:
        with tarfile.open(path, "a") as tar:
            tar.add(source / "config.json", "config.json")

    with pytest.raises(PullError, match=r"has config\.json twice"):
        pull(str(path), folder, tell=told.append)


@pytest.mark.parametrize("kind", [".tar.gz", ".zip"])
def test_a_damaged_archive_is_named(
    source: Path, folder: Path, told: list[Progress], kind: str
) -> None:
    """It is no failure of ours."""
    path = packed(source, kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    with pytest.raises(PullError, match="is damaged"):
        pull(str(path), folder, tell=told.append)


@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_a_damaged_archive_in_xz_is_named(
    source: Path, folder: Path, told: list[Progress], kind: str
) -> None:
    """A .tar is opened by what is in it, and a .zip may use it inside."""
    path = source.with_name(f"packed{kind}")
    content = source / "model.safetensors"
    content.write_bytes(content.read_bytes()[:8] + random.Random(0).randbytes(1 << 20))
    if kind == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
            archive.write(content, content.name)
    else:
        with tarfile.open(path, "w:xz") as tar:
            tar.add(content, content.name)
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 1000] = bytes(1000)
    path.write_bytes(damaged)

    with pytest.raises(PullError, match="is damaged"):
        pull(str(path), folder, tell=told.append)


def test_a_damaged_member_is_named(source: Path, folder: Path, told: list[Progress]) -> None:
    """What it holds is not what the archive says of it."""
    path = source.with_name("stored.zip")
    with zipfile.ZipFile(path, "w") as archive:
        for name in names(source):
            archive.write(source / name, name)
    content = bytearray(path.read_bytes())
    content[content.index(bytes(1000)) + 500] = 1
    path.write_bytes(content)

    with pytest.raises(PullError, match="is damaged: Bad CRC-32"):
        pull(str(path), folder, tell=told.append)
    assert not (folder / "stored").exists()


def test_checksums_are_compared(source: Path, folder: Path, told: list[Progress]) -> None:
    """A file that differs is not in the folder; what was left out is not missed later."""
    digest = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    sums = source / "SHA256SUMS"
    sums.write_text(f"{digest}  config.json\n{digest}  pytorch_model.bin\n")

    pulled = pull(str(source), folder, "good", tell=told.append)
    verify_sums(pulled.path)
    assert (pulled.path / "SHA256SUMS").read_text() == f"{digest}  config.json\n"

    sums.write_text(f"{digest}  tokenizer.json\n")
    with pytest.raises(CheckpointError, match="SHA-256"):
        pull(str(source), folder, "bad", tell=told.append)
    assert not (folder / "bad").exists()


def test_the_index_is_compared(source: Path, folder: Path, told: list[Progress]) -> None:
    """With the headers of the files that it names."""
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}))
    pull(str(source), folder, "good", tell=told.append)
    index.write_text(json.dumps({"weight_map": {"wait": "model.safetensors"}}))

    with pytest.raises(CheckpointError, match="lacks wait"):
        pull(str(source), folder, "bad", tell=told.append)


def test_what_does_not_fit_is_not_begun(
    source: Path, folder: Path, told: list[Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive cannot fill the disk."""
    monkeypatch.setattr(
        "appliance.checkpoints.pull.shutil.disk_usage", lambda path: SimpleNamespace(free=1000)
    )

    with pytest.raises(PullError, match="are free on"):
        pull(str(packed(source, ".zip")), folder, tell=told.append)


@pytest.mark.parametrize(
    "text",
    [
        *("a/" * 5000, "a\0b", "a" * 5000 + ".zip"),
        *("http://192.0.2.1/latest", "https://evil.example/model.zip", "file:///etc", "oci://a/b"),
    ],
)
def test_what_is_no_path_is_no_source(text: str) -> None:
    """What the system would not even look for is told like what is not there; so are URLs, which
    would lead the daemon elsewhere than its hub."""
    with pytest.raises(PullError, match="neither a directory, nor an archive"):
        find_source(text)


def test_a_source_has_to_be_one(folder: Path, told: list[Progress]) -> None:
    """What nobody understands is refused before anything is made."""
    with pytest.raises(PullError, match="neither a directory, nor an archive"):
        pull("no/such/archive.zip", folder, tell=told.append)
    assert not folder.exists()


# --- a hub ---------------------------------------------------------------------------------------


class HubDouble:
    """Stands in for `huggingface_hub`: one model, whose revision is resolved once."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.fetched: list[str] = []
        self.fail_at = ""
        self.wrong_digest = False
        self.begin_at = 0
        self.steps: list[int] = []
        """What its bars are called with, for each file."""
        self.also: list[str] = []
        """Names of files more, each with the same content."""

    def HfApi(self) -> HubDouble:  # noqa: N802
        return self

    def model_info(self, name: str, *, revision: str | None, files_metadata: bool) -> Any:
        if name != "org/tiny" or revision not in (None, "v1"):
            raise RuntimeError("404: no such model\nwith details")
        siblings = []
        for file in sorted(names(self.source)):
            content = (self.source / file).read_bytes()
            digest = "0" * 64 if self.wrong_digest else hashlib.sha256(content).hexdigest()
            lfs = SimpleNamespace(sha256=digest) if file.endswith(".safetensors") else None
            siblings.append(SimpleNamespace(rfilename=file, size=len(content), lfs=lfs))
        siblings += [SimpleNamespace(rfilename=file, size=2, lfs=None) for file in self.also]
        return SimpleNamespace(sha="abc", siblings=siblings)

    def hf_hub_download(
        self, name: str, file: str, *, revision: str, local_dir: Path, tqdm_class: type[Any]
    ) -> str:
        assert revision == "abc"
        if file == self.fail_at:
            raise ConnectionError("the line is dead")
        self.fetched.append(file)
        with tqdm_class(desc=file, total=1, initial=self.begin_at) as bar:
            for nbytes in self.steps:
                bar.update(nbytes)
                bar.update_transfer(nbytes)
        if self.steps:  # as for a file that comes in parts
            bar.set_postfix_str("1 B/s", refresh=False)
            bar.refresh()
        local_dir.mkdir(exist_ok=True)
        if file in self.also:  # a library that does not check names
            (local_dir / "also").write_bytes(b"{}")
            return str(local_dir / "also")
        (local_dir / file).write_bytes((self.source / file).read_bytes())
        return str(local_dir / file)


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch) -> HubDouble:
    double = HubDouble(source)
    (source / "pytorch_model.bin").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "huggingface_hub", double)
    return double


def test_a_hub_s_model_is_fetched(hub: HubDouble, folder: Path, told: list[Progress]) -> None:
    """Only what belongs to a checkpoint; after a failure, only what is missing."""
    hub.fail_at = "tokenizer.json"
    with pytest.raises(PullError, match="does not give it: ConnectionError: the line is dead"):
        pull("org/tiny@v1", folder, tell=told.append)
    hub.fail_at = ""

    pulled = pull("org/tiny@v1", folder, tell=told.append)

    assert (pulled.name, pulled.path) == ("org/tiny", folder / "org--tiny")
    assert names(pulled.path) == PULLED
    assert hub.fetched == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("begin_at", "steps", "shown"),
    [
        (0, [600_000, 400_000], [0, 600_000, 1_000_000]),
        (600_000, [300_000], [0, 600_000, 900_000]),
        (0, [600_000, -600_000, 500_000], [0, 600_000, 0, 500_000]),
        (0, [600_000, 600_000], [0, 600_000]),
    ],
)
def test_how_far_a_hub_s_file_is(
    hub: HubDouble,
    folder: Path,
    told: list[Progress],
    begin_at: int,
    steps: list[int],
    shown: list[int],
) -> None:
    """As it comes: also if part of it was there, or has to come again, and never more than all of
    it."""
    hub.begin_at, hub.steps = begin_at, steps
    pull("org/tiny", folder, tell=told.append)

    weights = [one for one in told if one.file == "model.safetensors"]
    total = (folder / "org--tiny" / "model.safetensors").stat().st_size
    assert [one.done_bytes for one in weights] == [*shown, total]
    assert {one.total_bytes for one in weights} == {total}


def test_what_comes_damaged_from_a_hub(hub: HubDouble, folder: Path, told: list[Progress]) -> None:
    """Is not what the hub says that it is."""
    hub.wrong_digest = True

    with pytest.raises(PullError, match="came damaged"):
        pull("org/tiny", folder, tell=told.append)


@pytest.mark.parametrize("name", ["../keys.json", "a/../../keys.json", "{}/keys.json", "a\\k.json"])
def test_a_name_of_a_hub_that_leads_out(
    hub: HubDouble, folder: Path, told: list[Progress], name: str
) -> None:
    """Nothing is fetched, and nothing outside of the model's folder is written, whether or not the
    hub's library checks names."""
    keys = folder / "keys.json"
    folder.mkdir(exist_ok=True)
    keys.write_text("mine")
    hub.also = [name.format(folder)]

    with pytest.raises(PullError, match="leads out of it"):
        pull("org/tiny", folder, tell=told.append)

    assert keys.read_text() == "mine"
    assert hub.fetched == []


def test_a_hub_that_does_not_answer(
    folder: Path, told: list[Progress], hub: HubDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or is not known at all: the message says that it is no directory either."""
    with pytest.raises(PullError, match=r"no directory here.*RuntimeError: 404: no such model$"):
        pull("org/other", folder, tell=told.append)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullError, match="not installed"):
        pull("org/tiny", folder, tell=told.append)


# --- on the command line -------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["pull", *arguments, "--no-add"])


def test_pull_on_the_command_line(source: Path, folder: Path) -> None:
    """A line for each file, or JSON for each step; status 1 when it goes wrong."""
    done = command(str(source), "--dir", str(folder))
    taken = command(str(packed(source, ".zip")), "--dir", str(folder), "--name", "tiny")
    lines = command(str(source), "--dir", str(folder), "--name", "b", "--json")

    assert done.exit_code == 0, done.output
    assert "fetched model.safetensors (1.0MiB)\n" in done.stdout
    assert done.stdout.endswith(f"verifying\ntiny is in {folder / 'tiny'}\n")
    assert (taken.exit_code, "is there already" in taken.stderr) == (1, True)
    steps = [json.loads(line) for line in lines.stdout.splitlines()]
    assert {step["status"] for step in steps} == {"fetching", "verifying", "success"}
    assert steps[-1] == {"status": "success", "model": "b", "path": str(folder / "b")}
