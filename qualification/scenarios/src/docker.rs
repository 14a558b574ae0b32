//! Real Docker in a machine: started as an installation prepares it, images that need no network, and a client that asks a
//! container all along.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::lab::{lab, scratch};
use crate::machine::Machine;

/// As an installation writes it.
const CONFIGURATION: &str = r#"{"live-restore": true, "features": {"containerd-snapshotter": true},
    "log-driver": "json-file", "insecure-registries": ["10.77.0.1:5000", "10.77.0.1:5001", "10.77.0.1:5002"]}"#;

/// Images: `web:1` and `web:2` serve a page that names them, `exits:1` says a word and ends with 3.
const IMAGES: &str = r#"set -e
    mkdir -p /tmp/image/bin /tmp/image/www
    cp /usr/bin/busybox /tmp/image/bin/
    ln -sf busybox /tmp/image/bin/sh
    for n in 1 2; do
        echo "page $n" >/tmp/image/www/index.html
        tar -C /tmp/image -c . | docker import -c 'CMD ["/bin/busybox","httpd","-f","-p","8080","-h","/www"]' - web:$n
    done
    tar -C /tmp/image -c . | docker import -c 'CMD ["/bin/sh","-c","echo boom; exit 3"]' - exits:1"#;

/// Asks one address all the time; the counts are in a file when it is ended.
const LOAD: &str = r#"
import signal, socket, sys, time
asked = failed = 0
errors = []
on = True
def end(*_):
    global on
    on = False
signal.signal(signal.SIGTERM, end)
while on:
    asked += 1
    try:
        s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)
        s.settimeout(2)
        s.sendall(b"GET / HTTP/1.0\r\n\r\n")
        text = b""
        while True:
            piece = s.recv(4096)
            if not piece:
                break
            text += piece
        if b"page" not in text:
            raise OSError("not the page: %r" % text[:60])
    except OSError as e:
        failed += 1
        errors.append("%.1f %s" % (time.time(), e))
    time.sleep(0.01)
open(sys.argv[3], "w").write("%d %d %s\n" % (asked, failed, "; ".join(errors[:5])))
"#;

/// A registry (the Docker Registry HTTP API v2, for one image `web:1`) in the lab, without TLS. What it does with a layer is
/// in a file: `fast`, `slow`, `break`, `stall`.
const REGISTRY: &str = r#"
import gzip, hashlib, http.server, io, json, os, socketserver, sys, tarfile, time
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as tar:
    tar.add(os.path.realpath("/bin/busybox"), "bin/busybox")
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
    def handle(self):
        # Docker tries TLS first, and goes on without where the answer is plain HTTP.
        if self.connection.recv(1, 2) == b"\x16":
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return
        super().handle()
    def answer(self, data, kind, body=True):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Docker-Content-Digest", digest(data))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        mode = open(sys.argv[2]).read().strip() if data is packed else "fast"
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
server = Server(("10.77.0.1", int(sys.argv[1])), Registry)
print("serves", flush=True)
server.serve_forever()
"#;

/// A registry in the lab, ended when this value is dropped.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    mode: PathBuf,
    port: u16,
}

impl Registry {
    /// Starts one more.
    pub fn start() -> Self {
        static PORT: AtomicU16 = AtomicU16::new(5000);
        Self::at(PORT.fetch_add(1, Ordering::Relaxed))
    }

    fn at(port: u16) -> Self {
        let (program, mode) =
            (scratch().join("registry.py"), scratch().join(format!("registry-{port}.mode")));
        fs::write(&program, REGISTRY).expect("writing the registry");
        fs::write(&mode, "fast").expect("writing its mode");
        let words = [
            "lab",
            "python3",
            &program.display().to_string(),
            &port.to_string(),
            &mode.display().to_string(),
        ];
        let words = lab().words(&words);
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starting the registry");
        let mut said = String::new();
        let stdout = child.stdout.take().expect("the registry's standard output");
        BufReader::new(stdout).read_line(&mut said).expect("hearing the registry");
        assert_eq!(said.trim(), "serves", "the registry does not start: see above");
        Self { child, mode, port }
    }

    /// The name of its image.
    pub fn image(&self) -> String {
        format!("10.77.0.1:{}/web:1", self.port)
    }

    /// What it does with a layer from now on: `fast`, `slow`, `break`, `stall`.
    pub fn does(&self, mode: &str) {
        fs::write(&self.mode, mode).expect("writing its mode");
    }

    /// Ends it, and starts it again.
    pub fn away(&mut self, meanwhile: impl FnOnce()) {
        self.end();
        meanwhile();
        *self = Self::at(self.port);
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.end();
    }
}

/// A client that asks a container all along; see [`Machine::traffic`].
#[derive(Debug)]
pub struct Traffic {
    unit: String,
}

/// What it saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// Requests.
    pub asked: u64,
    /// Those that were not answered with the page.
    pub failed: u64,
    /// The first errors.
    pub errors: String,
}

impl Machine {
    /// Starts Docker as an installation prepares it, and makes the images.
    #[track_caller]
    pub fn start_docker(&self) {
        self.write("/etc/docker/daemon.json", CONFIGURATION);
        self.run("systemctl start docker.service").ok();
        self.run_within(120, IMAGES).ok();
    }

    /// Asks the container of this name at its own address from now on.
    #[track_caller]
    pub fn traffic(&self, container: &str) -> Traffic {
        let format = "{{.NetworkSettings.IPAddress}}";
        let address = self.run(&format!("docker inspect -f '{format}' {container}")).expect(0);
        let unit = format!("traffic-{container}");
        self.write("/root/load.py", LOAD);
        let out = format!("/root/{unit}.served");
        self.run(&format!(
            "rm -f {out}; systemd-run -q --unit {unit} python3 /root/load.py {} 8080 {out}",
            address.text()
        ))
        .ok();
        Traffic { unit }
    }

    /// Ends a client of [`Machine::traffic`]; what it saw.
    #[track_caller]
    pub fn served(&self, traffic: &Traffic) -> Served {
        let unit = &traffic.unit;
        let run = self.run(&format!("systemctl stop {unit}; cat /root/{unit}.served")).expect(0);
        let mut words = run.text().splitn(3, ' ');
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a count");
        let (asked, failed) = (number(), number());
        Served { asked, failed, errors: words.next().unwrap_or_default().to_owned() }
    }

    /// The containers of a service that are there: `NAME STATE`, a line each.
    #[track_caller]
    pub fn containers(&self, service: &str) -> Vec<String> {
        let filter = format!("label=ployz.service={service}");
        let run =
            self.run(&format!("docker ps -a --filter {filter} --format '{{{{.Names}}}} {{{{.State}}}}'"));
        run.expect(0).text().lines().map(str::to_owned).collect()
    }
}
