//! Volumes of the plugin, with real Docker: served all along an upgrade, and their data outlives whatever ends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, Server, note, release, serve};

const PLOYZD: &str = "/usr/local/bin/ployzd";
const PLUGIN: &str = "ployz-volume-plugin.service";

/// One client: makes a volume, writes to it through a container, lists it, reads it in another container and removes it,
/// over and over. A round that failed is told with what failed.
const CLIENT: &str = r#"
n=$1 rounds=0 failed=0
trap 'on=no' TERM
on=yes
try() { "$@" >/root/client-$n.out 2>&1 || { echo "round $rounds: $*: $(tail -c 300 /root/client-$n.out)" >>/root/client-$n.failed; return 1; }; }
while [ $on = yes ]; do
    rounds=$((rounds + 1))
    v=load-$n-$rounds
    try docker volume create -d ployz $v &&
    try docker run --rm --network none -v $v:/d web:1 /bin/sh -c "echo $rounds >/d/file" &&
    try sh -c "docker volume ls -q -f driver=ployz | grep -qx $v" &&
    try docker run --rm --network none -v $v:/d web:1 /bin/sh -c "read n </d/file; [ \$n = $rounds ]" &&
    try docker volume rm $v || failed=$((failed + 1))
done
echo $rounds $failed >/root/client-$n.done
"#;
/// Asks the plugin itself all along: no request may wait long, none may fail.
const ASKER: &str = r#"
import json, signal, socket, time
on, asked, failed, longest = True, 0, [], 0
def end(*_):
    global on
    on = False
signal.signal(signal.SIGTERM, end)
while on:
    asked += 1
    began = time.time()
    try:
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(30)
        s.connect("/run/docker/plugins/ployz.sock")
        body = b'{"Name":"data"}'
        s.sendall(b"POST /VolumeDriver.Get HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        text = b""
        while True:
            piece = s.recv(65536)
            if not piece:
                break
            text += piece
        if json.loads(text.split(b"\r\n\r\n", 1)[1])["Volume"]["Name"] != "data":
            raise OSError("not the volume")
    except (OSError, ValueError, KeyError, IndexError) as e:
        failed.append("%s: %r" % (type(e).__name__, str(e)))
    longest = max(longest, time.time() - began)
    time.sleep(0.02)
open("/root/asker.done", "w").write("%d %d %d %s\n" % (asked, len(failed), longest * 1000, failed[:3]))
"#;

fn prepared(name: &str) -> (Server, Machine) {
    let server = serve(name).release(&release("1.4.0")).release(&release("1.5.0")).start();
    let machine =
        Machine::named(name).image(Image::TrixieDocker).served_by(&server).installed("1.4.0").boot();
    machine.start_docker();
    machine.run(&format!("{PLOYZD} install --docker auto")).ok();
    (server, machine)
}

/// The page that the container of volume `data` serves from it.
fn page(machine: &Machine) -> String {
    machine.run("docker exec keeper /bin/busybox cat /data/file").expect(0).text().to_owned()
}

#[test]
fn volumes_are_served_all_along_an_upgrade_and_their_data_outlives_whatever_ends() {
    let new = release("1.5.0");
    let (_server, machine) = prepared("volumes");
    machine.run("docker volume create -d ployz data").ok();
    machine.run("docker run -d --restart unless-stopped --name keeper -v data:/data web:1").ok();
    machine.run("docker exec keeper /bin/sh -c 'echo kept >/data/file'").ok();
    let place =
        machine.run("docker volume inspect -f '{{.Mountpoint}} {{.Scope}}' data").expect(0).text().to_owned();
    assert_eq!(place, "/var/lib/ployz-volumes/data/_data local");
    assert_eq!(machine.run("cat /var/lib/ployz-volumes/data/_data/file").text(), "kept");
    // What can't be is said by name, and a service gets volumes of this driver.
    let _ = machine.run("docker volume create -d ployz -o size=1g sized").expect(1).says(&["--storage zfs"]);
    let _ = machine
        .run("docker volume create -d ployz -o type=nfs other")
        .expect(1)
        .says(&["\"type\" is not known"]);
    let _ = machine.run("docker volume rm data").expect(1).says(&["in use"]);
    machine.run(&format!("{PLOYZD} service deploy web --image web:2 --volume served:/served")).ok();
    assert_eq!(machine.run("docker volume inspect -f '{{.Driver}}' served").text(), "ployz");

    // Upgrades there and back, while four clients and one that asks the plugin itself go on.
    let traffic = machine.traffic("keeper");
    let docker = machine.run("systemctl show -p MainPID,NRestarts docker.service containerd.service").stdout;
    machine.write("/root/client", CLIENT);
    machine.write("/root/asker.py", ASKER);
    machine.run("systemd-run -q --unit asker python3 /root/asker.py").ok();
    machine.run("for n in 1 2 3 4; do systemd-run -q --unit client-$n bash /root/client $n; done").ok();
    for version in ["1.5.0", "1.4.0", "1.5.0"] {
        let plugin = machine.run(&format!("systemctl show -P MainPID {PLUGIN}")).text().to_owned();
        let id = machine.ask_for(version);
        machine.assert_upgraded(&id, &release(version));
        let now = machine.run(&format!("systemctl show -P MainPID {PLUGIN}")).text().to_owned();
        assert_ne!(plugin, now, "the plugin was not replaced");
    }
    // Killed in the middle of whatever it was doing.
    for _ in 0..5 {
        machine.run(&format!("sleep 1; systemctl kill -s KILL {PLUGIN}; sleep 2")).ok();
    }
    machine.run_within(120, "systemctl stop client-1 client-2 client-3 client-4; systemctl stop asker").ok();
    let failed = machine.run("cat /root/client-*.failed 2>/dev/null").stdout;
    let rounds = machine.run("cat /root/client-*.done").expect(0).text().to_owned();
    note(&format!("volumes: rounds and failures of four clients: {}", rounds.replace('\n', ", ")));
    note(&format!("volumes: asked, failed, longest ms: {}", machine.run("cat /root/asker.done").text()));
    assert!(failed.is_empty(), "{failed}");
    assert_eq!(rounds.lines().count(), 4, "{rounds}");
    let served = machine.served(&traffic);
    assert_eq!(served.failed, 0, "{served:?}");
    assert_eq!(
        machine.run("systemctl show -p MainPID,NRestarts docker.service containerd.service").stdout,
        docker
    );
    assert_eq!(page(&machine), "kept");
    machine.assert_healthy();
    machine.assert_runs("1.5.0", &new.sha256);

    // Docker and its volumes do not wait for a plugin that is stopped, masked and back.
    machine.run("systemctl stop ployz-volume-plugin.socket ployz-volume-plugin.service && systemctl start ployz-volume-plugin.socket").ok();
    machine.run("timeout 5 docker volume ls").ok();
    machine
        .run("systemctl mask --now ployz-volume-plugin.service; systemctl unmask ployz-volume-plugin.service")
        .ok();
    machine.run("systemctl restart ployz-volume-plugin.socket; timeout 10 docker volume ls && docker run --rm -v data:/d web:1 /bin/busybox test -e /d/file").ok();
    machine.run("systemctl restart docker.service").ok();
    assert_eq!(page(&machine), "kept");
    machine.reboot();
    machine.until("the container is back", |machine| {
        machine.run("docker exec keeper /bin/busybox true").code == 0
    });
    assert_eq!(page(&machine), "kept");
    machine.lose_power();
    machine.until("the container is back", |machine| {
        machine.run("docker exec keeper /bin/busybox true").code == 0
    });
    assert_eq!(page(&machine), "kept");
    assert_eq!(
        machine.run("docker volume ls -q -f driver=ployz | sort | tr '\\n' ' '").text(),
        "data served"
    );
    let _ = machine.run(&format!("{PLOYZD} doctor")).says(&["directories of this host's filesystem"]);
}

#[test]
fn a_container_with_a_volume_starts_at_boot_after_a_power_loss_in_an_upgrade() {
    let (server, machine) = prepared("volumes-power");
    machine.run("docker volume create -d ployz data").ok();
    machine.run("docker run -d --restart always --name keeper -v data:/data web:1").ok();
    machine.run("docker exec keeper /bin/sh -c 'echo kept >/data/file; sync'").ok();
    let id = machine.ask_and_hold(&server, "1.5.0");
    // A container starts while the upgrade is under way.
    machine.run("docker run --rm -v data:/d web:1 /bin/busybox grep -q kept /d/file").ok();
    machine.lose_power();
    server.obey();
    machine.until("the container is back", |machine| {
        machine.run("docker exec keeper /bin/busybox true").code == 0
    });
    assert_eq!(page(&machine), "kept");
    assert_eq!(machine.told(&id)["state"], "interrupted");
    let id = machine.ask_for("1.5.0");
    machine.assert_upgraded(&id, &release("1.5.0"));
    assert_eq!(page(&machine), "kept");
}
