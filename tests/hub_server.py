"""A stand-in of the Hugging Face hub: what huggingface_hub's client asks for, on loopback, in a process of its own.

`python hub_server.py` prints its port. It stores repositories in memory: commits with their files, branches, tags,
large files apart, access by token. POST /_control changes how it behaves: {"break": n} drops the connection once after
n bytes of a large file, {"stop": n} refuses every download after n more files, {"down": true} answers 503, and
{"clear": true} forgets the log of requests, which GET /_log returns.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKENS = {"hf_alice": "alice", "hf_bob": "bob"}
LARGE = (".safetensors", ".parquet", ".mp4", ".bin")


class Repository:
    """Commits by hash, each path -> blob; refs: branches and tags -> hash."""

    def __init__(self, owner: str, private: bool):
        self.owner, self.private, self.gated = owner, private, False
        self.commits: dict[str, dict[str, str]] = {}
        self.refs: dict[str, str] = {}
        self.commit({})

    def commit(self, files: dict[str, str]) -> str:
        sha = hashlib.sha1(json.dumps([sorted(files.items()), len(self.commits)]).encode()).hexdigest()
        self.commits[sha] = files
        self.refs["main"] = sha
        return sha


class Hub:
    """Everything that the server knows."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.large: set[str] = set()
        self.behaviour: dict[str, Any] = {}
        self.log: list[str] = []
        self.lock = threading.Lock()


HUB = Hub()


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_HEAD(self) -> None:
        self.handle_one("HEAD")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_PUT(self) -> None:
        self.handle_one("PUT")

    def do_DELETE(self) -> None:
        self.handle_one("DELETE")

    def handle_one(self, method: str) -> None:
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self.chunk, b""))
        if not path.startswith("/_"):
            HUB.log.append(f"{method} {path}" + (f" {self.headers['Range']}" if self.headers.get("Range") else ""))
        try:
            if HUB.behaviour.get("down") and not path.startswith("/_"):
                raise Refused(503)
            self.answer(method, path, query, body)
        except Refused as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            self.send({"error": error.message}, error.status, {key: text for key, text in headers.items() if text})

    def chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def send(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def user(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise Refused(401, message="Invalid credentials in Authorization header")
        return TOKENS.get(token, "")

    def repository(self, kind: str, name: str, write: bool = False) -> Repository:
        user = self.user()
        repository = HUB.repositories.get((kind, name))
        if repository is None or (repository.private and repository.owner != user):
            raise Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if repository.gated and repository.owner != user:
            raise Refused(403, "GatedRepo", "Access to model is restricted")
        if write and repository.owner != user:
            raise Refused(403, message="You don't have the rights to write to this repository")
        return repository

    def commit_of(self, repository: Repository, revision: str) -> str:
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> None:
        parts = path.strip("/").split("/")
        if path == "/_control":
            HUB.behaviour.update(given := json.loads(body))
            if given.get("clear"):
                HUB.log.clear()
            if "gate" in given:
                HUB.repositories["models", given["gate"]].gated = True
            self.send({})
        elif path == "/_log":
            self.send(HUB.log)
        elif path == "/_put":
            self.put_repository(json.loads(body))
        elif path == "/api/whoami-v2":
            self.send({"type": "user", "name": self.user()})
        elif path == "/api/validate-yaml":
            self.send({"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif parts[0] == "api":
            self.api(method, parts[1], "/".join(parts[2:4]), parts[4:], body)
        elif parts[0] == "lfs":
            HUB.blobs[parts[1]] = body
            HUB.large.add(parts[1])
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.send({})
        else:
            self.resolve(parts, body)

    def put_repository(self, given: dict[str, Any]) -> None:
        """Make a repository of files given as base64, as somebody else's upload."""
        files = {
            name: self.store(base64.b64decode(data), name.endswith(LARGE)) for name, data in given["files"].items()
        }
        made = Repository(given.get("owner", "eve"), given.get("private", False))
        made.commit(files)
        HUB.repositories[given.get("kind", "models"), given["name"]] = made
        self.send({})

    def store(self, data: bytes, large: bool) -> str:
        oid = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        HUB.blobs[oid] = data
        if large:
            HUB.large.add(oid)
        return oid

    def create(self, given: dict[str, Any]) -> None:
        user = self.user()
        if not user:
            raise Refused(401, message="Invalid username or password.")
        owner, kind = given.get("organization") or user, f"{given.get('type', 'model')}s"
        if owner != user:
            raise Refused(403, message=f"You don't have the rights to create a {kind[:-1]} under the namespace {owner}")
        name = f"{owner}/{given['name']}"
        url = f"http://{self.headers['Host']}/{name}"
        if (kind, name) in HUB.repositories:
            self.send({"url": url, "error": "You already created this repo"}, 409)
            return
        HUB.repositories[kind, name] = Repository(owner, given.get("visibility") == "private")
        self.send({"url": url, "name": name})

    def api(self, method: str, kind: str, name: str, rest: list[str], body: bytes) -> None:
        write = method != "GET" and not (rest and rest[0] == "paths-info")
        repository = self.repository(kind, name, write)
        what = rest[0] if rest else "revision"
        if what == "revision":
            self.information(repository, name, rest[1] if len(rest) > 1 else "main")
        elif what == "tree":
            files = repository.commits[self.commit_of(repository, rest[1])]
            self.send([{"type": "file", "path": path, **self.described(oid)} for path, oid in files.items()])
        elif what == "refs":
            tags = [
                {"name": t, "ref": f"refs/tags/{t}", "targetCommit": s}
                for t, s in repository.refs.items()
                if t != "main"
            ]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.refs["main"]}
            self.send({"branches": [main], "tags": tags, "converts": []})
        elif what == "preupload":
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            known = repository.commits[repository.refs["main"]]
            self.send(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": mode[file["path"].endswith(LARGE)],
                            "shouldIgnore": False,
                            "oid": known.get(file["path"]),
                        }
                        for file in files
                    ]
                }
            )
        elif what == "commit":
            self.add_commit(repository, name, body)
        elif what == "tag" and method == "POST":
            repository.refs[json.loads(body)["tag"]] = self.commit_of(repository, rest[1])
            self.send({})
        elif what == "tag":
            if repository.refs.pop(rest[1], None) is None:
                raise Refused(404, "RevisionNotFound")
            self.send({})
        else:
            raise Refused(404, message=f"no such thing: {what}")

    def described(self, oid: str) -> dict[str, Any]:
        size = len(HUB.blobs[oid])
        large = {"lfs": {"oid": oid, "size": size, "sha256": oid, "pointerSize": 130}} if oid in HUB.large else {}
        return {"oid": oid, "size": size, **large}

    def information(self, repository: Repository, name: str, revision: str) -> None:
        sha = self.commit_of(repository, revision)
        files = [
            {"rfilename": path, "blobId": oid, **self.described(oid)} for path, oid in repository.commits[sha].items()
        ]
        self.send({"id": name, "modelId": name, "sha": sha, "private": repository.private, "siblings": files})

    def add_commit(self, repository: Repository, name: str, body: bytes) -> None:
        files = dict(repository.commits[repository.refs["main"]])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = self.store(base64.b64decode(value["content"]), large=False)
            elif item["key"] == "lfsFile":
                assert value["oid"] in HUB.blobs
                files[value["path"]] = value["oid"]
        sha = repository.commit(files)
        self.send({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, parts: list[str], body: bytes) -> None:
        """Serve a file, or the batch interface for large ones: [datasets/]USER/NAME/resolve/REVISION/PATH."""
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if kind == "datasets" else parts
        name = "/".join(parts[:2]).removesuffix(".git")
        if parts[-1] == "batch":
            self.repository(kind, name, write=True)
            self.lfs_batch(json.loads(body))
            return
        repository = self.repository(kind, name)
        sha = self.commit_of(repository, parts[3])
        oid = repository.commits[sha].get("/".join(parts[4:]))
        if oid is None:
            raise Refused(404, "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        self.send_file(HUB.blobs[oid], headers, oid in HUB.large)

    def lfs_batch(self, given: dict[str, Any]) -> None:
        place = f"http://{self.headers['Host']}/lfs/"
        objects = [
            {"oid": each["oid"], "size": each["size"]}
            | ({} if each["oid"] in HUB.blobs else {"actions": {"upload": {"href": place + each["oid"]}}})
            for each in given["objects"]
        ]
        self.send({"transfer": "basic", "objects": objects})

    def send_file(self, data: bytes, headers: dict[str, str], large: bool) -> None:
        if self.command == "GET" and "stop" in HUB.behaviour:
            with HUB.lock:
                if HUB.behaviour["stop"] <= 0:
                    raise Refused(503)
                HUB.behaviour["stop"] -= 1
        start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]) if self.headers.get("Range") else 0
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        stop = HUB.behaviour.get("break") if large and self.command == "GET" else None
        if stop is None:
            self.send(data[start:], status, headers)
            return
        del HUB.behaviour["break"]
        self.send_response(status)
        for key, text in {"Content-Length": str(len(data) - start), **headers}.items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(data[start : start + stop])
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
