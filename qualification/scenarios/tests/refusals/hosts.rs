//! Rows of the host: where nothing can be written, or is not what it should be. Preflight looks at the host before
//! anything is fetched; what it can't foresee is told by the write that fails.

use serde_json::json;

use crate::table::{ACQUIRING, At, PREFLIGHT, Table, UPGRADE};

const STAGING: &str = "/usr/local/lib/ployz/staging";

pub(crate) fn rows(table: &mut Table<'_>) {
    let mut before = |name: &str, fault: [&str; 2], says: &str| table.host(name, fault, PREFLIGHT, says, 5);
    for dir in ["/usr/local/bin", "/usr/local/lib/systemd/system"] {
        let there = format!("mount --bind {dir} {dir}; mount -o remount,bind,ro {dir}");
        let says = format!("{dir} is mounted read-only");
        before(&format!("{dir}: read-only"), [&there, &format!("umount {dir}")], &says);
    }
    let there = "mount -t tmpfs -o size=128m,mode=755 tmpfs /usr/local/lib/systemd/system";
    let back = "umount /usr/local/lib/systemd/system";
    before("units on a filesystem of their own", [there, back], "on a filesystem of its own");
    let there = "mount -t tmpfs -o size=32m,mode=755 tmpfs /usr/local/lib/ployz";
    before(
        "/usr/local/lib/ployz: 32 MiB",
        [there, "umount /usr/local/lib/ployz"],
        " MiB free, and 88 MiB are needed",
    );
    let open = ["chmod o+w /usr/local/lib/ployz", "chmod o-w /usr/local/lib/ployz"];
    before("/usr/local/lib/ployz: anyone's", open, "may be written by everyone");
    let linked = [
        "mv /usr/local/bin/ployzd /opt/ployzd; ln -s /opt/ployzd /usr/local/bin/ployzd",
        "rm /usr/local/bin/ployzd; mv /opt/ployzd /usr/local/bin/ployzd",
    ];
    before("ployzd is a symbolic link", linked, "/usr/local/bin/ployzd is not a regular file");

    // What is installed can't be run there: by another copy, as from a bootstrap.
    let noexec = "mount --bind /usr/local/bin /usr/local/bin; mount -o remount,bind,noexec /usr/local/bin";
    table.machine.run(&format!("cp /usr/local/bin/ployzd /opt/other; {noexec}")).ok();
    let other = UPGRADE.replace("/usr/local/bin/ployzd", "/opt/other");
    let says = "/usr/local/bin is mounted noexec";
    table.refused("/usr/local/bin: noexec", &other, PREFLIGHT, says, 5);
    table.machine.run("umount /usr/local/bin; rm /opt/other").ok();

    let dir = "/usr/local/lib/ployz";
    let there = format!("mount --bind {dir} {dir}; mount -o remount,bind,ro {dir}");
    let says = "/usr/local/lib/ployz/self: Read-only file system";
    table.host(&format!("{dir}: read-only"), [&there, &format!("umount {dir}")], At::Nothing, says, 5);

    let elsewhere = [
        &format!("rmdir {STAGING}; mkdir /opt/elsewhere; ln -s /opt/elsewhere {STAGING}"),
        &format!("rm {STAGING}; rmdir /opt/elsewhere; mkdir {STAGING}"),
    ];
    let elsewhere = elsewhere.map(String::as_str);
    table.host("staging is a symbolic link", elsewhere, At::Stage("preparing"), "is not a directory", 5);

    full(table);
}

/// A disk that is full, at each write in turn.
fn full(table: &mut Table<'_>) {
    let state = "/var/lib/ployz-install";
    for (name, options, says) in [
        ("records: no file can be made", "nr_inodes=1", "admission"),
        ("records: full after the lock", "size=4k", "the attempt's record can't be written"),
    ] {
        let there = format!("mount -t tmpfs -o {options},mode=755 tmpfs {state}");
        table.host(name, [&there, &format!("umount {state}")], At::Nothing, says, 5);
    }
    for (name, options, at, says) in [
        ("staging: no file can be made", "nr_inodes=1", At::Stage("preparing"), "making staging under"),
        (
            "staging: full in the archive",
            "size=1m",
            ACQUIRING,
            "linux_amd64.tar.gz\": No space left on device",
        ),
    ] {
        let there = format!("mount -t tmpfs -o {options},mode=755 tmpfs {STAGING}");
        table.host(name, [&there, &format!("umount {STAGING}")], at, says, 5);
    }
    // /usr on a small disk, which something else fills up when the download has begun: so many KiB are left.
    let small =
        "mkdir -p /run/small; mount -t tmpfs -o size=120m tmpfs /run/small; mkdir /run/small/u /run/small/w
        mount -t overlay -o lowerdir=/usr,upperdir=/run/small/u,workdir=/run/small/w overlay /usr";
    let fill = |left: u32| {
        format!(
            "until ls {STAGING}/*/*.tar.gz >/dev/null 2>&1; do sleep 0.02; done
             free=$(df -k --output=avail /run/small | tail -n 1)
             fallocate -l $((free - {left}))k /run/small/filler"
        )
    };
    for (name, left, at, says) in [
        ("/usr: full in the executable", 4000, PREFLIGHT, ".ployzd.ID\": No space left on device"),
        ("/usr: full in the previous one", 9000, At::Stage("activating"), "keeping the previous binary"),
    ] {
        table.machine.run(&format!("set -e; {small}")).ok();
        table.server.rules(&json!([{"path": "*.tar.gz", "drip": {"bytes": 200_000, "every_ms": 80}}]));
        let filler = table.machine.start_run(&fill(left));
        table.refused(name, UPGRADE, at, says, 6);
        filler.end().ok();
        table.server.obey();
        table.machine.run("umount -l /usr; umount -l /run/small").ok();
    }
}
