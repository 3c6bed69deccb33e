"""Tests of uploads and downloads, with a local server instead of the Hugging Face Hub.

The server answers the requests of the real client, `huggingface_hub`, and keeps repositories in memory.
"""

import base64
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

import mvrbm
from mvrbm.errors import StorageError

yaml = pytest.importorskip("yaml", reason="huggingface_hub, which needs it, is not installed")
pytest.importorskip("huggingface_hub")

DATA = np.random.default_rng(0).random((20, 4, 3))


class Hub(ThreadingHTTPServer):
    """A server with repositories by name. Each is a list of commits, which map paths to contents."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits, self.requests, self.sizes = {}, [], {}
        self.address = f"http://127.0.0.1:{self.server_port}"

    def files(self, name, revision="main"):
        commits = self.commits[name]
        return commits[-1] if revision == "main" else commits[int(revision, 16)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        try:
            answer, headers = self.answer(hub, path.strip("/").split("/"), body)
        except (KeyError, IndexError, ValueError):
            return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        return self.reply(200, answer if isinstance(answer, bytes) else json.dumps(answer).encode(), headers)

    do_GET = do_HEAD = do_POST = handle_request  # noqa: N815

    def answer(self, hub, parts, body):
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.commits.setdefault(name, [{}])
            return {"url": f"{hub.address}/{name}"}, {}
        if parts == ["api", "validate-yaml"]:
            assert yaml.safe_load(json.loads(body)["content"].split("---")[1])["library_name"] == "mvrbm"
            return {"errors": [], "warnings": []}, {}
        if parts[2:3] == ["resolve"]:
            name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            content = hub.files(name, revision)[file]
            return content, {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": self.sha(name, revision),
            }
        if parts[:2] != ["api", "models"]:
            raise KeyError(parts)
        name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
        files, action = hub.files(name, revision), parts[4] if len(parts) > 4 else "revision"
        if action == "revision":
            siblings = [
                {"rfilename": path, "size": hub.sizes.get(path, len(content))} for path, content in files.items()
            ]
            return {"_id": "1", "id": name, "sha": self.sha(name, revision), "siblings": siblings}, {}
        if action == "tree":
            return [{"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40} for path in files], {}
        if action == "preupload":
            return {
                "files": [
                    {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
                ]
            }, {}
        if action == "commit":
            hub.commits[name].append(self.changed(files, body))
            return {"commitUrl": f"{hub.address}/{name}/commit/{self.sha(name)}", "commitOid": self.sha(name)}, {}
        raise KeyError(action)

    def sha(self, name, revision="main"):
        return f"{len(self.server.commits[name]) - 1:040x}" if revision == "main" else revision

    def changed(self, files, body):
        files = dict(files)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        return files

    def reply(self, code, content, headers):
        self.send_response(code)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Start a server, and import the client again so that it connects to it."""
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for module in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, module)
    settings = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": "token"}
    for name, value in {**settings, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()
    for module in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def model():
    return mvrbm.MVRBM((2, 2), rank=2, n_epochs=1, random_state=0).fit(DATA)


def test_a_pushed_model_is_loaded_by_its_name(hub, model):
    address = model.push_to_hub("user/name", data="Random numbers.", license="cc0-1.0", figures={"error": 0.25})
    assert address == f"{hub.address}/user/name/commit/{1:040x}"
    assert set(hub.files("user/name")) == {"config.json", "model.safetensors", "README.md"}
    assert 'mvrbm.load("user/name")' in hub.files("user/name")["README.md"].decode()
    loaded = mvrbm.load("user/name")
    np.testing.assert_array_equal(loaded.transform(DATA), model.transform(DATA))
    n_requests = len([path for command, path in hub.requests if command == "GET" and "/resolve/" in path])
    mvrbm.load("user/name")
    assert len([path for command, path in hub.requests if command == "GET" and "/resolve/" in path]) == n_requests
    hub.shutdown()  # Without a network, the model is loaded from the cache.
    hub.server_close()
    np.testing.assert_array_equal(mvrbm.load("user/name").transform(DATA), model.transform(DATA))
    with pytest.raises(StorageError, match="no folder 'user/other', and it cannot be loaded from the Hugging Face Hub"):
        mvrbm.load("user/other")


def test_a_push_replaces_the_model_and_keeps_revisions(hub, model):
    chains = mvrbm.MVRBM((2, 2), n_epochs=1, negative="pcd", random_state=0).fit(DATA)
    chains.push_to_hub("user/name")
    assert "chains.safetensors" in hub.files("user/name")
    hub.files("user/name")["notes.txt"] = b"somebody else's"
    mvrbm.push_to_hub(model.machine_, "user/name")
    assert set(hub.files("user/name")) == {"config.json", "model.safetensors", "README.md", "notes.txt"}
    assert isinstance(mvrbm.load("user/name"), mvrbm.BoltzmannMachine)
    old = mvrbm.load(f"user/name@{1:040x}")
    np.testing.assert_array_equal(old.transform(DATA), chains.transform(DATA))


def test_only_model_files_are_downloaded_and_they_are_checked(hub, model, tmp_path):
    model.push_to_hub("user/name")
    files = hub.files("user/name")
    files["model.py"] = files["pytorch_model.bin"] = b"never read"
    hub.requests.clear()
    mvrbm.load("user/name")
    assert not [path for _, path in hub.requests if path.endswith((".py", ".bin", ".md"))]
    for name, content, reason in (
        ("model.safetensors", b"no tensors", "truncated"),
        ("config.json", b"[1]", "JSON object"),
        ("config.json", b'{"format": "other"}', "does not describe an mvrbm model"),
    ):
        hub.commits["user/name"].append({**files, name: content})
        with pytest.raises(StorageError, match=reason):
            mvrbm.load("user/name")
    del hub.files("user/name")["model.safetensors"]
    with pytest.raises(StorageError, match=r"is not an mvrbm model: .* is missing"):
        mvrbm.load("user/name")


def test_models_that_are_too_large_are_not_downloaded(hub, model):
    model.push_to_hub("user/name")
    hub.sizes["model.safetensors"] = 2**40
    hub.requests.clear()
    with pytest.raises(StorageError, match=r"has 1,099,511,\d+,\d+ bytes, which exceeds the limit"):
        mvrbm.load("user/name")
    assert not [path for _, path in hub.requests if "/resolve/" in path]


def test_paths_are_not_looked_up_on_the_hub(hub, tmp_path):
    (tmp_path / "runs").mkdir()
    for folder in ("runs/mistyped", "model", "a/b/c", "../user/name", tmp_path / "user" / "name"):
        with pytest.raises(StorageError, match="does not exist and is not the name of an included model"):
            mvrbm.load(folder)
    assert not hub.requests
    with pytest.raises(StorageError, match=r"cannot be loaded from the Hugging Face Hub: .*Not Found"):
        mvrbm.load("user/name")


@pytest.mark.parametrize("edit", ["text", "no mark"])
def test_a_push_keeps_a_card_that_was_edited_on_the_hub(hub, model, edit):
    model.push_to_hub("user/name", data="First.")
    model.push_to_hub("user/name", data="Second.")
    files = hub.files("user/name")
    card = files["README.md"]
    assert b"Second." in card
    edited = card.replace(b"Second.", b"Edited.") if edit == "text" else b"# Written by hand\n"
    hub.commits["user/name"].append({**files, "README.md": edited})
    other = mvrbm.RBM(2, n_epochs=1, random_state=0).fit(DATA.reshape(20, -1))
    with pytest.warns(UserWarning, match=r"README.md of 'user/name' was edited, so it is kept"):
        mvrbm.push_to_hub(other, "user/name", data="Third.")
    assert hub.files("user/name")["README.md"] == edited
    assert isinstance(mvrbm.load("user/name"), mvrbm.RBM)


def test_invalid_models_and_arguments_raise(tmp_path):
    with pytest.raises(StorageError, match="expected a machine or an estimator, but got an object of type list"):
        mvrbm.save_pretrained([], tmp_path / "model")
    with pytest.raises(TypeError, match="licence"):  # The argument is spelled as on the hub.
        mvrbm.ModelCard(licence="cc0-1.0")
