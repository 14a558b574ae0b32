//! What stands between the file that is replaced and what systemd starts: named with both paths before any change,
//! and gone when the help that is given is typed. And labels of files, which are those of where a file is.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use kit::release::Archive;
use scenarios::{Machine, Release, release, scratch, serve};

const PLOYZD: &str = "/usr/local/bin/ployzd";
const UPGRADE: &str = "/usr/local/bin/ployzd install --version 1.5.0 --json";
const ADMIN: &str = "/etc/systemd/system";

/// Prepares, is refused in these words, types the help that is given, and succeeds.
fn refused_then_helped(machine: &Machine, name: &str, prepare: &str, says: &[&str], to: &Release) {
    machine.run(&format!("set -e; {prepare}; systemctl daemon-reload")).ok();
    let command = UPGRADE.replace("1.5.0", &to.version);
    let before = machine.watch();
    let run = machine.run(&command).expect(4);
    before.assert_same(&machine.watch());
    machine.assert_nothing_left();
    let record = run.record();
    assert_eq!(record["installation"], "unchanged", "{name}: {record}");
    assert_eq!(record["outcome"]["failed"]["reason"], "host", "{name}: {record}");
    let run = run.says(says);
    let helps: Vec<&str> = record["outcome"]["failed"]["help"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|help| help.as_str())
        .collect();
    // "remove the override: systemctl revert ployz.service"
    let typed: Vec<&str> =
        helps.iter().filter_map(|help| help.split_once(": ")).map(|(_, typed)| typed).collect();
    assert!(!typed.is_empty(), "{name}: no help:\n{}", run.shown());
    for help in typed {
        machine.run(help).ok();
    }
    machine.run(&command).ok();
    machine.assert_runs(&to.version, &to.sha256);
}

#[test]
fn what_systemd_would_start_instead_is_named_and_its_help_helps() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("in-the-way").release(&old).release(&new).start();
    let machine = Machine::named("in-the-way").served_by(&server).installed("1.4.0").boot();
    machine.run("cp /usr/local/bin/ployzd /opt/ployzd").ok();

    let drop_in = format!("{ADMIN}/ployz.service.d");
    let prepare = format!(
        "mkdir -p {drop_in}; printf '[Service]\\nExecStart=\\nExecStart=/opt/ployzd daemon\\n' >{drop_in}/mine.conf"
    );
    refused_then_helped(&machine, "override", &prepare, &["/opt/ployzd", PLOYZD], &new);

    let prepare = "systemctl mask ployz.service".to_owned();
    refused_then_helped(&machine, "mask", &prepare, &["ployz.service is masked"], &old);

    let (shadow, ours) = (format!("{ADMIN}/ployz.service"), "/usr/local/lib/systemd/system/ployz.service");
    refused_then_helped(&machine, "shadow", &format!("cp {ours} {shadow}"), &[&shadow, ours], &new);
    let shadow = format!("{ADMIN}/ployz.socket");
    let prepare = format!("cp /usr/local/lib/systemd/system/ployz.socket {shadow}");
    refused_then_helped(&machine, "shadow of the socket", &prepare, &[&shadow], &old);
}

#[test]
fn a_copy_elsewhere_on_path_is_never_what_is_replaced() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("copies").release(&old).release(&new).start();
    let machine = Machine::named("copies").served_by(&server).installed("1.4.0").boot();
    machine.run("cp /usr/local/bin/ployzd /usr/local/sbin/ployzd").ok();
    // As a shell finds it: the copy, not what is installed.
    let run = machine.run(
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/bin; command -v ployzd; ployzd install --version 1.5.0",
    );
    let _ = run.expect(0).says(&["/usr/local/sbin/ployzd"]);
    machine.assert_runs("1.5.0", &new.sha256);
    assert_eq!(machine.sha256("/usr/local/sbin/ployzd"), old.sha256, "the copy is not ours");
}

/// Whether a file inside carries the label.
fn is_labelled(machine: &Machine, path: &str) -> bool {
    let (dir, name) = path.rsplit_once('/').unwrap();
    let list =
        format!("tar --xattrs --xattrs-include='*' -C {dir} -cf - {name} | grep -ac 'xattr.user.label'");
    machine.run(&list).text() != "0"
}

#[test]
fn labels_are_those_of_the_place_and_restored_where_there_is_a_tool() {
    let machine = Machine::named("labels").installed("1.4.0").boot();
    let new = release("1.5.0");
    // A `ployzd` that carries a label of where it was downloaded to.
    let labelled = Archive::new().pax(&[("SCHILY.xattr.user.label", "tmp_t")]);
    let labelled = labelled.file("ployzd", std::fs::read(new.ployzd()).unwrap());
    let file = scratch().join("labelled.tar.gz");
    std::fs::write(&file, labelled.bytes()).unwrap();
    machine.put(&file, "/root/labelled.tar.gz");
    machine
        .run("mkdir /root/d; tar --xattrs --xattrs-include='*' -xzf /root/labelled.tar.gz -C /root/d")
        .ok();
    assert!(is_labelled(&machine, "/root/d/ployzd"), "the label is not there to begin with");
    machine.run("/root/d/ployzd install --docker none --json").ok();
    machine.assert_runs("1.5.0", &new.sha256);
    for path in [PLOYZD, "/usr/local/bin/ployzd.previous", "/usr/local/lib/systemd/system/ployz.service"] {
        assert!(!is_labelled(&machine, path), "{path} has the label of another place");
    }

    // No policy here: what is shown is that the tool is asked, for what was put in place, and that its failure is
    // not that of the installation.
    machine.write("/usr/sbin/restorecon", "#!/bin/sh\necho \"$@\" >>/run/restored\nexit 1\n");
    machine.run("chmod 755 /usr/sbin/restorecon").ok();
    machine.install(&release("1.4.0")).ok();
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    assert!(machine.read("/run/restored").split_whitespace().any(|path| path == PLOYZD));
}
