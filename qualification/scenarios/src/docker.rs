//! Real Docker in a machine: started as an installation prepares it, images that need no network, and a client that asks a
//! container all along, at its own address or where it is published.

use crate::look::Watched;
use crate::machine::Machine;
use crate::releases::Release;
use crate::run::Run;

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

/// What no Deploy of one service may change: Docker's own processes, its packages, and every container, whoever made it.
const WATCH: &str = r"
    dpkg-query -W
    systemctl show -p Id,MainPID,ExecMainStartTimestampMonotonic,NRestarts docker.service containerd.service
    for id in $(docker ps -aq --no-trunc); do
        docker inspect -f '{{.Name}} {{.Id}} {{.State.Status}} {{.State.StartedAt}} {{.State.Pid}} {{.RestartCount}} {{.HostConfig.RestartPolicy.Name}}' $id
    done
    docker volume ls -q";

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
        // Tests start it more often than anyone else does.
        self.run("mkdir -p /etc/systemd/system/docker.service.d").ok();
        self.write("/etc/systemd/system/docker.service.d/often.conf", "[Unit]\nStartLimitIntervalSec=0\n");
        self.run("systemctl daemon-reload; systemctl start docker.service").ok();
        self.run_within(120, IMAGES).ok();
    }

    /// Installs a release as the bootstrap does it, on a machine whose Docker is used.
    #[track_caller]
    pub fn install_with_docker(&self, release: &Release) -> Run {
        let from = self.deliver(release);
        let ployzd = format!("/root/{}-{}/ployzd", release.version, &release.sha256[..8]);
        self.run_within(120, &format!("{ployzd} install {from}"))
    }

    /// What no Deploy of one service may change; of its own container only when nothing was to be changed.
    #[track_caller]
    pub fn watch_docker(&self) -> Watched {
        Watched(self.run(WATCH).expect(0).stdout.lines().map(str::to_owned).collect())
    }

    /// Asks the container of this name at its own address from now on.
    #[track_caller]
    pub fn traffic(&self, container: &str) -> Traffic {
        let format = "{{.NetworkSettings.IPAddress}}";
        let address = self.run(&format!("docker inspect -f '{format}' {container}")).expect(0);
        self.traffic_at(container, address.text(), 8080)
    }

    /// Asks at an address and port from now on.
    #[track_caller]
    pub fn traffic_at(&self, name: &str, address: &str, port: u16) -> Traffic {
        let unit = format!("traffic-{name}");
        self.write("/root/load.py", LOAD);
        let out = format!("/root/{unit}.served");
        let load = format!("python3 /root/load.py {address} {port} {out}");
        self.run(&format!("rm -f {out}; systemd-run -q --unit {unit} {load}")).ok();
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
