//! Hosts on which the bootstrap refuses, each with its own words, before or after it has fetched something.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::world::{BASE, SHELLS, enter, mount, real, script};

const LIB: &str = "/usr/local/lib/ployz";
const VERSION: &[&str] = &["--version", "1.4.0"];

#[test]
fn platform() {
    let Some(world) = enter!() else { return };
    for (uname, words) in [
        ("Darwin arm64", "no release for Darwin arm64"),
        ("FreeBSD x86_64", "no release for FreeBSD x86_64"),
        ("Linux i686", "no release for Linux i686"),
        ("Linux riscv64", "no release for Linux riscv64"),
        ("Linux aarch64", "ployzd_linux_arm64.tar.gz"),
        ("Linux arm64", "ployzd_linux_arm64.tar.gz"),
        ("Linux x86_64", "ployzd_linux_amd64.tar.gz"),
    ] {
        world.pretend("uname", &format!("[ \"$*\" = -sm ] && echo '{uname}'"));
        // A release without archives: what it is asked for is what the message names.
        world.server.set_rules(vec![kit::Rule::new("*/checksums.txt").body("")]);
        world.run(VERSION).refused(4, words);
    }
}

#[test]
fn systemd() {
    let Some(world) = enter!() else { return };
    fs::remove_dir("/run/systemd/system").unwrap();
    for shell in SHELLS {
        world.run(VERSION).shell(shell).refused(4, "no systemd here; for an image: --installation-only");
        let ended = world.run(&["--installation-only"]).shell(shell).end();
        assert_eq!(ended.code, 0, "{}: {ended:?}", shell.name);
        assert_eq!(world.called().unwrap().last().unwrap(), "--installation-only");
    }
}

#[test]
fn tools() {
    let Some(world) = enter!() else { return };
    for tool in ["awk", "tar", "gzip"] {
        world.take_away(tool);
        world.run(VERSION).refused(4, &format!("no {tool}: install it"));
        world.grant(tool, tool);
    }
    world.take_away("sha256sum");
    world.run(VERSION).refused(4, "no sha256sum: install it");
    for other in ["shasum", "openssl"] {
        world.grant(other, other);
        let ended = world.run(VERSION).end();
        assert_eq!(ended.code, 0, "{other}: {ended:?}");
        world.called().unwrap();
        world.take_away(other);
    }
    world.grant("sha256sum", "sha256sum");
    world.take_away("curl");
    mount(&[real("busybox").to_str().unwrap(), "/usr/bin/wget", "--bind"]);
    world.run(VERSION).refused(4, "no curl, and no wget that verifies TLS: install curl");
    mount(&["/dev/null", "/usr/bin/wget", "--bind"]);
    world.run(VERSION).refused(4, "no curl, and no wget that verifies TLS: install curl");
}

#[test]
fn from_a_pipe_an_ordinary_user_is_told_what_to_type() {
    let Some(world) = enter!() else { return };
    world.pretend("sudo", "echo called >>\"$HOME/sudo\"");
    let url = world.server.url();
    let pipe = "not root; type: curl -fsSL https://ployz.sh/machine | sudo";
    for shell in SHELLS {
        let plain = |args| {
            world.run(args).shell(shell).ordinary_user().env("PLOYZ_RELEASES", "").env("PLOYZ_CHANNELS", "")
        };
        plain(&[]).refused(77, &format!("{pipe} sh\n"));
        plain(&["--channel", "beta", "--json"])
            .refused(77, &format!("{pipe} sh -s -- --channel beta --json\n"));
        let mirrors = format!(
            "{pipe} env PLOYZ_RELEASES={url}/releases/download PLOYZ_CHANNELS={url} sh -s -- --json\n"
        );
        world.run(&["--json"]).shell(shell).ordinary_user().refused(77, &mirrors);
    }
    // A file in the current directory that has the name of the shell is not the script.
    for shell in SHELLS {
        for name in ["sh", "dash", "bash", "ksh", "zsh", "busybox"] {
            fs::copy(script(), world.directory.join("cwd").join(name)).unwrap();
        }
        world.run(&[]).shell(shell).ordinary_user().refused(77, pipe);
    }
    assert!(!world.home("sudo").exists());
}

#[test]
fn from_a_file_it_goes_on_by_sudo() {
    let Some(world) = enter!() else { return };
    let cwd = world.directory.join("cwd");
    fs::copy(script(), cwd.join("machine.sh")).unwrap();
    fs::copy(script(), cwd.join("machine")).unwrap();
    fs::write(cwd.join("provision.sh"), format!(". {}\n", script().display())).unwrap();
    let awkward = &["--version", "1.4.0", "--group-user", "a  b", "", "*"];
    for shell in SHELLS {
        world.take_away("sudo");
        world
            .run(awkward)
            .shell(shell)
            .file("machine.sh")
            .ordinary_user()
            .refused(77, "not root; type: curl");
        world.pretend("sudo", "printf '%s\\0' \"$@\" >\"$HOME/sudo\"; exit 9");
        for file in ["./machine", "provision.sh"] {
            world.run(awkward).shell(shell).file(file).ordinary_user().refused(77, "not root; type: curl");
        }
        for file in [Path::new("machine.sh"), &cwd.join("machine.sh")] {
            world.run(awkward).shell(shell).file(file).ordinary_user().refused(9, "");
            let argv = fs::read_to_string(world.home("sudo")).unwrap();
            let argv: Vec<_> = argv.split_terminator('\0').collect();
            let url = world.server.url();
            let mirrors =
                [format!("PLOYZ_RELEASES={url}/releases/download"), format!("PLOYZ_CHANNELS={url}")];
            let file = cwd.join("machine.sh").display().to_string();
            assert_eq!(argv[..6], ["--", "env", &mirrors[0], &mirrors[1], "sh", &file], "{}", shell.name);
            assert_eq!(argv[6..], awkward[..], "{}", shell.name);
            // What sudo would have run does it.
            let path = world.directory.join("bin");
            let status = Command::new(real("env"))
                .args(&argv[2..])
                .env_clear()
                .envs([("PATH", path), ("HOME", world.directory.join("home"))])
                .env("CURL_CA_BUNDLE", world.directory.join("ca.pem"))
                .status()
                .unwrap();
            assert!(status.success());
            assert_eq!(world.called().unwrap()[8..], awkward[2..]);
        }
    }
}

#[test]
fn staging_is_roots_alone() {
    let Some(world) = enter!() else { return };
    let elsewhere = world.directory.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::create_dir_all("/usr/local/lib").unwrap();
    let mode = |path: &str, mode| {
        fs::create_dir_all(path).unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    };
    for shell in SHELLS {
        for path in [LIB, BASE] {
            let attempt = |what: &str| {
                let words = format!("refusing {path}: not a directory that only root writes");
                let ended = world.run(VERSION).shell(shell).end();
                assert_eq!((ended.code, world.called()), (4, None), "{what}, {}: {ended:?}", shell.name);
                assert!(ended.err.contains(&words), "{what}, {}: {ended:?}", shell.name);
                assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0, "{what}");
                let _ = fs::remove_file(path).or_else(|_| fs::remove_dir_all(path));
            };
            fs::create_dir_all(Path::new(path).parent().unwrap()).unwrap();
            symlink(&elsewhere, path).unwrap();
            attempt("symlink");
            symlink("/nowhere", path).unwrap();
            attempt("dangling symlink");
            fs::write(path, "").unwrap();
            attempt("file");
            mode(path, 0o775);
            attempt("the group may write");
            mode(path, 0o757);
            attempt("others may write");
        }
        fs::remove_dir_all(LIB).unwrap();
        assert_eq!(world.run(VERSION).shell(shell).end().code, 0);
        world.called().unwrap();
        for made in [LIB, BASE] {
            assert_eq!(
                fs::metadata(made).unwrap().permissions().mode() & 0o7777,
                0o755,
                "{}: {made}",
                shell.name
            );
        }
        fs::remove_dir_all(LIB).unwrap();
    }
    fs::create_dir(LIB).unwrap();
    mount(&["--rbind", world.foreign().to_str().unwrap(), LIB]);
    world.run(VERSION).refused(4, "refusing /usr/local/lib/ployz");
}

#[test]
fn filesystems_that_cannot_stage() {
    let Some(world) = enter!() else { return };
    fs::create_dir_all(BASE).unwrap();
    let over = |options: &str| mount(&["-t", "tmpfs", "-o", options, "tmpfs", LIB]);
    let undo = || assert!(Command::new(real("umount")).arg(LIB).status().unwrap().success());
    for shell in SHELLS {
        over("mode=755,noexec");
        let ended = world.run(VERSION).shell(shell).refused(4, &format!("is {LIB} mounted noexec?"));
        assert!(ended.err.contains(&format!("cannot run {BASE}/")), "{ended:?}");
        undo();
        over("mode=755,ro");
        world.run(VERSION).shell(shell).refused(4, &format!("refusing {BASE}"));
        undo();
        over("mode=755,size=4k");
        world.run(VERSION).shell(shell).refused(4, "cannot fetch");
        undo();
    }
    mount(&["-o", "remount,bind,ro", "/usr/local"]);
    world.run(VERSION).refused(4, &format!("cannot write {BASE}"));
}

#[test]
fn leftovers_of_a_day_are_swept() {
    let Some(world) = enter!() else { return };
    let elsewhere = world.directory.join("elsewhere");
    fs::create_dir_all(elsewhere.join("kept")).unwrap();
    let names = ["1.AAAAAA", "22222.b0b0b0", "3.CCCCCC", "mine", "4.short", "x5.DDDDDD"];
    let long_ago = SystemTime::now() - Duration::from_secs(49 * 3600);
    for shell in SHELLS {
        for name in names {
            fs::create_dir_all(Path::new(BASE).join(name).join("within")).unwrap();
            if name != "3.CCCCCC" {
                fs::File::open(Path::new(BASE).join(name)).unwrap().set_modified(long_ago).unwrap();
            }
        }
        fs::write(Path::new(BASE).join("6.EEEEEE"), "a file").unwrap();
        symlink(&elsewhere, Path::new(BASE).join("7.FFFFFF")).unwrap();
        fs::File::open(&elsewhere).unwrap().set_modified(long_ago).unwrap();
        assert_eq!(world.run(VERSION).shell(shell).end().code, 0, "{}", shell.name);
        let mut left: Vec<_> = world
            .staged()
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        left.sort();
        assert_eq!(
            left,
            ["3.CCCCCC", "4.short", "6.EEEEEE", "7.FFFFFF", "mine", "x5.DDDDDD"],
            "{}",
            shell.name
        );
        assert!(elsewhere.join("kept").exists());
        fs::remove_dir_all(BASE).unwrap();
    }
}
