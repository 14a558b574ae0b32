//! Real Docker in a machine: started as an installation prepares it, images that need no network, and a client that asks a
//! container all along.

use crate::machine::Machine;

/// As an installation writes it.
const CONFIGURATION: &str = "{\"live-restore\": true, \"features\": {\"containerd-snapshotter\": true}, \"log-driver\": \"json-file\"}\n";

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
