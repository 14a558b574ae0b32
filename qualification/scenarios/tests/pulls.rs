//! Images that have to be pulled first: from a registry that is slow, breaks or stalls. Progress is shown, what fails is
//! named and changes nothing, what was admitted is finished, and what hangs can't keep a person from going back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::Instant;

use scenarios::{Image, Machine, note, release};
use serde_json::Value;

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// A registry (the Docker Registry HTTP API v2, for one image `web:1`) on loopback, which Docker takes without TLS. What
/// it does with a layer is in a file: `fast`, `slow`, `break`, `stall`.
const REGISTRY: &str = r#"
import gzip, hashlib, http.server, io, json, os, socketserver, tarfile, time
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as tar:
    tar.add("/usr/bin/busybox", "bin/busybox")
    link = tarfile.TarInfo("bin/sh"); link.type = tarfile.SYMTYPE; link.linkname = "busybox"; tar.addfile(link)
    page = b"page of the registry\n"
    info = tarfile.TarInfo("www/index.html"); info.size = len(page); tar.addfile(info, io.BytesIO(page))
    noise = os.urandom(6 << 20)
    info = tarfile.TarInfo("noise"); info.size = len(noise); tar.addfile(info, io.BytesIO(noise))
plain = layer.getvalue()
packed = gzip.compress(plain, 1)
digest = lambda data: "sha256:" + hashlib.sha256(data).hexdigest()
config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/www"]},
    "rootfs": {"type": "layers", "diff_ids": [digest(plain)]}}).encode()
kind = "application/vnd.docker.distribution.manifest.v2+json"
manifest = json.dumps({"schemaVersion": 2, "mediaType": kind,
    "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": len(config), "digest": digest(config)},
    "layers": [{"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": len(packed), "digest": digest(packed)}]}).encode()
blobs = {digest(config): config, digest(packed): packed}
class Registry(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, data, kind, body=True):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Docker-Content-Digest", digest(data))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        mode = open("/root/registry.mode").read().strip() if data is packed else "fast"
        if mode == "fast":
            self.wfile.write(data)
            return
        for at in range(0, len(data), 1 << 18):
            if at > len(data) // 2 and mode == "break":
                self.close_connection = True
                self.connection.shutdown(2)
                return
            if at > len(data) // 2 and mode == "stall":
                time.sleep(1000)
            self.wfile.write(data[at:at + (1 << 18)])
            time.sleep(0.2 if mode == "slow" else 0)
    def do_GET(self, body=True):
        last = self.path.rsplit("/", 1)[-1]
        if self.path == "/v2/":
            self.answer(b"{}", "application/json", body)
        elif self.path.startswith("/v2/web/manifests/") and last in ("1", digest(manifest)):
            self.answer(manifest, kind, body)
        elif self.path.startswith("/v2/web/blobs/") and last in blobs:
            self.answer(blobs[last], "application/octet-stream", body)
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
    def do_HEAD(self):
        self.do_GET(False)
    def log_message(self, *_):
        pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
Server(("127.0.0.1", 5000), Registry).serve_forever()
"#;

fn prepared(name: &str) -> Machine {
    let machine = Machine::named(name).image(Image::TrixieDocker).boot();
    machine.start_docker();
    machine.write("/root/registry.py", REGISTRY);
    machine
        .run("echo fast >/root/registry.mode; systemd-run -q --unit registry python3 /root/registry.py")
        .ok();
    machine.until("the registry answers", |machine| {
        machine.run("curl -fsS http://127.0.0.1:5000/v2/").code == 0
    });
    for version in ["1.4.0", "1.5.0"] {
        let from = machine.deliver(&release(version));
        let dir =
            from.split(" --archive ").nth(1).and_then(|rest| rest.split("/ployzd_linux").next()).unwrap();
        machine.run(&format!("{dir}/ployzd install {from} --docker auto")).ok();
    }
    machine
}

fn mode(machine: &Machine, mode: &str) {
    machine
        .run(&format!(
            "echo {mode} >/root/registry.mode; docker rmi -f 127.0.0.1:5000/web:1 >/dev/null 2>&1; true"
        ))
        .ok();
}

const DEPLOY: &str = "service deploy web --image 127.0.0.1:5000/web:1 --publish 8080:8080";

#[test]
fn a_pull_shows_how_far_it_is_goes_on_without_its_asker_and_is_named_when_it_fails() {
    let machine = prepared("pulls");
    machine.run(&format!("{PLOYZD} service deploy web --image web:1 --publish 8080:8080")).ok();
    let page = |machine: &Machine| machine.run("curl -sS -m 5 http://127.0.0.1:8080/").text().to_owned();
    for (what, words) in [("break", "can't be pulled"), ("gone", "can't be pulled")] {
        mode(&machine, what);
        if what == "gone" {
            machine.run("systemctl stop registry").ok();
        }
        let run = machine.run_within(120, &format!("{PLOYZD} {DEPLOY}")).expect(4);
        let _ = run.says(&[words, "Now: nothing of the service was changed", "docker pull"]);
        assert_eq!(page(&machine), "page 1", "{what}");
        assert_eq!(machine.containers("web"), ["ployz-web running"], "{what}");
    }
    machine.run("systemd-run -q --unit registry python3 /root/registry.py").ok();
    machine.until("the registry answers", |machine| {
        machine.run("curl -fsS http://127.0.0.1:5000/v2/").code == 0
    });
    let missing =
        machine.run(&format!("{PLOYZD} service deploy web --image 127.0.0.1:5000/nothing:1")).expect(4);
    let _ = missing.says(&["can't be pulled", "127.0.0.1:5000/nothing:1"]);

    mode(&machine, "slow");
    let run = machine.run_within(120, &format!("{PLOYZD} {DEPLOY} --json")).expect(0);
    let events: Vec<Value> = run.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let bytes: Vec<u64> = events.iter().filter_map(|event| event["progress"]["bytes"].as_u64()).collect();
    note(&format!("{} counts of bytes, up to {:?}", bytes.len(), bytes.iter().max()));
    assert!(bytes.len() > 3 && bytes.is_sorted() && bytes.iter().max() > Some(&1_000_000), "{}", run.shown());
    assert_eq!(page(&machine), "page of the registry");

    // The asker leaves in the middle of the pull.
    machine.run(&format!("{PLOYZD} service deploy web --image web:1 --publish 8080:8080")).ok();
    mode(&machine, "slow");
    let asked = machine.start_run(&format!("exec {PLOYZD} {DEPLOY}"));
    machine.until("it is under way", |machine| machine.api()["admission"]["what"] == "deploying web");
    machine.run("pkill -KILL -f '[p]loyzd service deploy'; systemctl restart ployz.service").ok();
    assert_ne!(asked.end().code, 0);
    let seen = machine.api()["admission"].clone();
    assert_eq!(seen["state"], "mutating", "{seen}");
    machine.until("it is finished", |machine| page(machine) == "page of the registry");
    machine.until("admission is free", |machine| machine.api()["admission"]["state"] == "free");
    machine.assert_healthy();
}

#[test]
fn a_deploy_that_hangs_and_one_that_never_ends_asking_keep_nobody_from_going_back() {
    let machine = prepared("pull-hangs");
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    machine.run("useradd -m mallory && usermod -a -G ployz mallory").ok();
    machine.run(&format!("{PLOYZD} service deploy web --image web:1")).ok();
    let traffic = machine.traffic("ployz-web");
    mode(&machine, "stall");
    let hung = machine.start_run(&format!("exec {PLOYZD} {DEPLOY}"));
    machine.until("it is under way", |machine| machine.api()["admission"]["what"] == "deploying web");
    let _ =
        machine.run(&format!("{PLOYZD} upgrade --version 1.4.0")).expect(3).says(&["deploying web since"]);
    let started = Instant::now();
    let run = machine.run_within(100, "/usr/local/bin/ployzd.previous recover --yes").expect(0);
    note(&format!("a Deploy hangs, and 1.4.0 is put back in {:.1} s", started.elapsed().as_secs_f32()));
    machine.assert_runs("1.4.0", &old.sha256);
    assert!(hung.end().code != 0, "{}", run.shown());
    assert_eq!(machine.containers("web"), ["ployz-web running"]);

    // Docker itself hangs in the middle of one.
    let hung = machine.start_run(&format!("exec {PLOYZD} service deploy web --image web:2"));
    machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
    machine.run("systemctl kill -s STOP docker.service").ok();
    let started = Instant::now();
    let _ = machine.run_within(120, "/usr/local/bin/ployzd.previous recover --yes").expect(0);
    note(&format!("Docker hangs, and 1.5.0 is put back in {:.1} s", started.elapsed().as_secs_f32()));
    machine.assert_runs("1.5.0", &new.sha256);
    machine.run("systemctl kill -s CONT docker.service").ok();
    drop(hung);
    machine.until("exactly one serves", |machine| machine.containers("web") == ["ployz-web running"]);

    // Somebody of the group asks for one Deploy after another.
    mode(&machine, "slow");
    machine.run("systemd-run -q --unit mallory --uid mallory sh -c 'while :; do /usr/local/bin/ployzd service deploy x --image web:1 --env A=$(date +%N); done'").ok();
    std::thread::sleep(std::time::Duration::from_secs(3));
    for (version, release) in [("1.4.0", &old), ("1.5.0", &new)] {
        machine.run_within(120, "/usr/local/bin/ployzd.previous recover --yes").ok();
        machine.assert_runs(version, &release.sha256);
    }
    machine.run("systemctl stop mallory").ok();
    let served = machine.served(&traffic);
    note(&format!("{served:?}"));
}
