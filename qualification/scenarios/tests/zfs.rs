//! Real ZFS, on a kernel and disks of its own: a pool is made of a blank disk and of nothing else, quotas hold, and volumes
//! outlive an upgrade, a restart, a power loss and a removal.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::Instant;

use scenarios::vm::Vm;
use scenarios::{Run, note, release};

const PLOYZD: &str = "/usr/local/bin/ployzd";
const DISK: &str = "/dev/vdb";
/// What a refusal may not have changed, and what a second run may not change.
const STATE: &str = "ls -la --time-style=full-iso /usr/local/bin /etc/modprobe.d /etc/ployz /var/lib/ployz-volumes 2>&1 | \
    grep -v 'total\\| \\.$\\| \\.\\.$'; cat /etc/docker/daemon.json; dpkg-query -W | sha256sum; \
    zpool list -H -o name,guid; zfs list -H -o name,guid; zpool history ployz 2>/dev/null | grep -v '^$'";
const BLANK: &str = "blkdiscard -z /dev/vdb; udevadm settle";
/// A client that makes a volume with a size, writes to it and reads it through containers, and removes it.
const CLIENT: &str = r#"
n=$1 rounds=0
trap 'on=no' TERM
on=yes
try() { "$@" >/root/client-$n.out 2>&1 || { echo "round $rounds: $*: $(tail -c 300 /root/client-$n.out)" >>/root/client-$n.failed; false; }; }
while [ $on = yes ]; do
    rounds=$((rounds + 1))
    v=load-$n-$rounds
    try docker volume create -d ployz -o size=16m $v &&
    try docker run --rm --network none -v $v:/d web:1 /bin/sh -c "echo $rounds >/d/file" &&
    try sh -c "docker volume ls -q -f driver=ployz | grep -qx $v" &&
    try docker run --rm --network none -v $v:/d web:1 /bin/sh -c "read n </d/file; [ \$n = $rounds ]" &&
    try docker volume rm $v
done
echo $rounds >/root/client-$n.done
"#;

/// Docker, an image, a source of releases on the machine itself.
fn prepare(vm: &Vm) {
    for version in ["1.4.0", "1.5.0"] {
        vm.deliver(&release(version));
        let to = format!("/srv/releases/download/v{version}");
        vm.run(&format!("mkdir -p {to} && mv /root/{version}/* {to}/")).ok();
    }
    vm.run(
        r#"set -e
        mkdir -p /etc/docker /etc/ployz /tmp/image/bin
        echo '{"live-restore": true, "features": {"containerd-snapshotter": true}}' >/etc/docker/daemon.json
        printf '[Service]\nExecStart=/bin/busybox httpd -f -p 127.0.0.1:8080 -h /srv\n[Install]\nWantedBy=multi-user.target\n' \
            >/etc/systemd/system/source.service
        systemctl enable -q --now source.service
        echo '{"schema": 1, "confirm_window": 2, "allow_http": true, "releases": "http://127.0.0.1:8080/releases/download"}' \
            >/etc/ployz/install.json
        cd /srv/releases/download/v1.4.0
        tar -C /root -xzf ployzd_linux_amd64.tar.gz ployzd
        systemctl restart docker.service"#,
    )
    .ok();
    vm.run(
        r#"set -e
        cp /usr/bin/busybox /tmp/image/bin/
        ln -s busybox /tmp/image/bin/sh
        tar -C /tmp/image -c . | docker import -c 'CMD ["/bin/busybox","sleep","1000000"]' - web:1"#,
    )
    .ok();
}

/// Installs 1.4.0 with storage.
fn install(vm: &Vm, program: &str, storage: &str) -> Run {
    let dir = "/srv/releases/download/v1.4.0";
    let files = format!("--archive {dir}/ployzd_linux_amd64.tar.gz --checksums {dir}/checksums.txt");
    vm.run(&format!("{program} install --version 1.4.0 {files} {storage}"))
}

fn refused(vm: &Vm, made: &str, storage: &str, words: &[&str]) {
    vm.run(made).ok();
    let before = vm.run(STATE).stdout;
    let _ = install(vm, "/root/ployzd", storage).expect(4).says(words);
    assert_eq!(vm.run(STATE).stdout, before, "{made}: something was changed");
    assert_eq!(vm.run("ls /usr/local/bin").text(), "", "{made}");
}

fn kept(vm: &Vm, when: &str) {
    let mut run = vm.run("docker exec keeper /bin/busybox cat /data/file");
    let since = Instant::now();
    while run.text() != "kept" && since.elapsed().as_secs() < 100 {
        run = vm.run("sleep 1; docker exec keeper /bin/busybox cat /data/file");
    }
    assert_eq!(run.text(), "kept", "{when}: {}", run.shown());
    let source = vm.run("findmnt -n -o FSTYPE,SOURCE /var/lib/ployz-volumes/data").text().to_owned();
    assert_eq!(source.split_whitespace().collect::<Vec<_>>(), ["zfs", "ployz/volumes/data"], "{when}");
}

#[test]
fn a_pool_is_made_of_a_blank_disk_alone_quotas_hold_and_volumes_outlive_everything() {
    let started = Instant::now();
    let vm = Vm::booted_of("zfs", "zfs");
    prepare(&vm);
    let lap = |what: &str| note(&format!("zfs: {what} after {:.0} s", started.elapsed().as_secs_f32()));
    lap("prepared");
    let device = format!("--storage zfs --pool-device {DISK}");
    refused(&vm, "true", "--storage zfs", &["there is no Machine Pool yet", "--pool-device"]);
    refused(
        &vm,
        "true",
        "--storage zfs --pool-file 500g",
        &["would leave the root filesystem", "it keeps 10 GiB"],
    );
    refused(&vm, "mke2fs -q /dev/vdb", &device, &["is not blank", "wipefs --no-act"]);
    refused(&vm, "wipefs -qa /dev/vdb", &device, &["is not blank"]);
    refused(&vm, &format!("{BLANK}; mkswap -q /dev/vdb; swapon /dev/vdb"), &device, &["/dev/vdb is in use"]);
    refused(
        &vm,
        &format!("swapoff /dev/vdb; {BLANK}; echo ,,L | sfdisk -q /dev/vdb; udevadm settle"),
        &device,
        &["has partitions (vdb1)"],
    );
    refused(
        &vm,
        &format!("wipefs -qa /dev/vdb; {BLANK}; zpool create ployz /dev/vdb"),
        &device,
        &["a pool ployz that was not made by Ployz"],
    );
    refused(
        &vm,
        "zpool export ployz",
        "--storage zfs",
        &["on a disk of this host that is not imported", "zpool import ployz"],
    );
    vm.run(&format!("zpool import ployz; zpool destroy ployz; wipefs -qa /dev/vdb1; wipefs -qa /dev/vdb; partx -d /dev/vdb; {BLANK}; true")).ok();
    lap("refusals");

    // A blank one.
    vm.run("modprobe -r zfs").ok();
    let run = install(&vm, "/root/ployzd", &device).expect(0);
    let _ = run.says(&[
        "a throw-away pool was made, seen, destroyed and is gone",
        "/dev/disk/by-id/virtio-blank0001",
    ]);
    let seen = vm.run("zpool list -H -o name,health; zfs get -H -o value ployz:machine ployz; ls /usr/local/lib/ployz; cat /sys/module/zfs/parameters/zfs_arc_max /etc/modprobe.d/ployz-zfs.conf /etc/ployz/storage.json");
    let _ = seen.says(&["ployz\tONLINE", "zfs_arc_max=", "\"dataset\": \"ployz/volumes\""]);
    let limit = vm.run("cat /sys/module/zfs/parameters/zfs_arc_max").text().parse::<u64>().unwrap();
    assert!((256 << 20..=512 << 20).contains(&limit), "{limit}");
    assert_eq!(vm.run("ls -A /usr/local/lib/ployz | grep proof; zpool list -H | grep -c proof").text(), "0");
    let before = vm.run(STATE).stdout;
    for storage in [device.as_str(), "--storage zfs", "--storage none", ""] {
        let run = install(&vm, PLOYZD, storage).expect(0);
        let _ = run.says(&["Nothing was needed"]);
        assert_eq!(vm.run(STATE).stdout, before, "{storage}: a second run changed something");
    }
    let _ = vm.run(&format!("{PLOYZD} doctor; true")).says(&["volumes are in ployz/volumes", "ONLINE"]);
    assert_eq!(
        vm.run("curl -sS --unix-socket /run/ployz/ployz.sock http://m/v1/machine | jq -c .storage").text(),
        r#"{"dataset":"ployz/volumes","pool":"ployz","state":"zfs"}"#
    );
    lap("pool");

    // Quotas, and what is asked again.
    vm.run(
        "docker volume create -d ployz -o size=64m data && docker volume create -d ployz -o size=64M data",
    )
    .ok();
    let _ = vm.run("curl -sS --unix-socket /run/docker/plugins/ployz.sock -d '{\"Name\":\"data\",\"Opts\":{\"size\":\"1g\"}}' http://p/VolumeDriver.Create")
        .says(&["is there already, with 64 MiB"]);
    vm.run("docker run -d --restart always --name keeper -v data:/data web:1 && docker exec keeper /bin/sh -c 'echo kept >/data/file'").ok();
    let full = vm.run(
        "docker run --rm -v data:/d web:1 /bin/sh -c 'busybox dd if=/dev/urandom of=/d/big bs=1M count=100'",
    );
    assert!(
        full.code != 0
            && ["Disk quota exceeded", "No space left"].iter().any(|text| full.both().contains(text)),
        "{}",
        full.shown()
    );
    vm.run("docker run --rm -v data:/d web:1 /bin/busybox rm /d/big; zpool sync ployz; sleep 6").ok();
    vm.run("docker exec keeper /bin/sh -c 'busybox dd if=/dev/urandom of=/data/small bs=1M count=20 2>/dev/null && busybox rm /data/small'").ok();
    // The first of two that stops leaves the second one its volume.
    vm.run("docker run -d --name second -v data:/data web:1 && docker rm -f second").ok();
    kept(&vm, "after another container stopped");
    lap("quotas");

    // Upgrades while clients go on; the plugin is killed in the middle.
    vm.write("/root/client", CLIENT);
    vm.run("for n in 1 2 3 4; do systemd-run -q --unit client-$n bash /root/client $n; done").ok();
    let docker = vm.run("systemctl show -p MainPID docker.service containerd.service").stdout;
    let upgraded = vm.run(&format!("{PLOYZD} upgrade --version 1.5.0 --json"));
    assert_eq!(upgraded.code, 0, "{}", upgraded.shown());
    vm.run("for n in 1 2 3; do sleep 3; systemctl kill -s KILL ployz-volume-plugin.service; done").ok();
    vm.run("systemctl stop client-1 client-2 client-3 client-4").ok();
    note(&format!(
        "zfs: rounds of four clients: {}",
        vm.run("cat /root/client-*.done | tr '\\n' ' '").text()
    ));
    let failed = vm.run("cat /root/client-*.failed 2>/dev/null").stdout;
    assert!(failed.is_empty(), "{failed}");
    assert_eq!(vm.run("systemctl show -p MainPID docker.service containerd.service").stdout, docker);
    kept(&vm, "after an upgrade");
    lap("upgrade");

    // Held elsewhere: named, and not said to be removed.
    vm.run("docker volume create -d ployz held && docker create --name holding -v held:/d web:1 && docker start holding && \
            (setsid unshare -m --propagation private sleep 1000 >/dev/null 2>&1 &) ; sleep 1; docker rm -f holding").ok();
    let _ = vm.run("docker volume rm held").expect(1).says(&["held by process", "(sleep)", "busy"]);
    vm.run("pkill -x sleep; docker volume rm held && ! zfs list ployz/volumes/held 2>/dev/null && [ ! -e /var/lib/ployz-volumes/held ]").ok();
    kept(&vm, "after another was removed");

    // Started anew, and without power.
    vm.run("sync; (sleep 1; systemctl reboot) >/dev/null 2>&1 &").ok();
    std::thread::sleep(std::time::Duration::from_secs(20));
    vm.cut();
    vm.boot();
    kept(&vm, "after a boot");
    vm.cut();
    vm.boot();
    kept(&vm, "after a power loss");
    lap("boots");

    // Without its pool nothing is written elsewhere.
    vm.run("docker stop -t 1 keeper && zpool export ployz").ok();
    let _ = vm.run("timeout 100 docker start keeper").says(&["pool ployz is not imported"]);
    assert_eq!(vm.run("find /var/lib/ployz-volumes -type f").text(), "");
    let _ = vm.run(&format!("{PLOYZD} doctor")).says(&["pool ployz is not imported", "zpool import ployz"]);
    let _ = install(&vm, PLOYZD, &device).expect(4).says(&["is not imported", "zpool import ployz"]);
    vm.run("zpool import ployz && docker start keeper").ok();
    kept(&vm, "after the pool was imported");

    // Removed, with everything but volumes; taken up again.
    vm.run("docker rm -f keeper").ok();
    let _ = vm
        .run(&format!("{PLOYZD} uninstall --purge --yes"))
        .expect(0)
        .says(&["pool ployz", "volumes are in it"]);
    vm.run("mkdir -p /etc/ployz; echo '{\"schema\": 1, \"confirm_window\": 2}' >/etc/ployz/install.json")
        .ok();
    let _ = install(&vm, "/root/ployzd", "--storage zfs").expect(0);
    vm.run("docker run -d --name keeper -v data:/data web:1").ok();
    kept(&vm, "after a removal");
    lap("all");
}
