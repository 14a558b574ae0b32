//! Before anything is replaced: the new binary runs here, is the release that was asked for, and its units are ours to
//! write; and what stands in the way on the host is named.

use std::fs;
use std::time::{Duration, Instant};

use ployz::install::attempt::Installation;
use serde_json::json;

use crate::world::{NONE, UNITS, World, alone, exact, script, script_that};

/// A world with 1.3.0 in place.
fn world(alone: &crate::world::Alone) -> World {
    let world = World::new(alone);
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    world
}

#[test]
fn a_binary_that_is_not_the_release_is_refused() {
    let alone = alone();
    let world = world(&alone);
    let units = |name: &str| {
        let unit = json!([{"name": name, "content": "[Unit]\n", "enable": true, "start": true}]);
        script_that("", "1.4.0", &unit.to_string())
    };
    let does = |what: &str| script_that(what, "1.4.0", UNITS);
    let no_units = "[]";
    for (name, ployzd, reason, says) in [
        ("another version", script("1.5.0"), "wrong_version", "says that it is 1.5.0, not 1.4.0"),
        // Where exec hands what is no program to a shell, the shell finds no version in it.
        ("empty", Vec::new(), "does_not_run|no_version", "the new binary "),
        ("not a program", b"\x7fELF, or so it says".to_vec(), "does_not_run|no_version", "the new binary "),
        ("no interpreter", b"#!/nonexistent/sh\n".to_vec(), "does_not_run", "does not run here"),
        ("fails", does("echo broken >&2; exit 9"), "does_not_run", "exited with status 9; it said: broken"),
        ("fakes a screen", does("printf '\\033[2Jfine\\r\\n\\nok' >&2; exit 1"), "does_not_run", "fine"),
        ("crashes", does("kill -SEGV $$"), "does_not_run", "was killed by SIGSEGV"),
        ("hangs", does("sleep 600"), "hangs", "did not end within 1 s and was killed"),
        ("talks for ever", does("while :; do echo y; done"), "does_not_run", "wrote more than 65536 bytes"),
        ("says nothing", does("exit 0"), "no_version", r#"says "", not its version"#),
        ("says a page", does("echo '<html>'; exit 0"), "no_version", "not its version"),
        ("units are no JSON", script_that("", "1.4.0", "x"), "units", "is not understood"),
        ("no units", script_that("", "1.4.0", no_units), "units", "brings 0 units"),
        ("units of others", units("ssh.service"), "units", r#"brings a unit named "ssh.service""#),
        ("units elsewhere", units("../ployz.service"), "units", r#"brings a unit named "../ployz.service""#),
        ("a timer", units("ployz.timer"), "units", r#"brings a unit named "ployz.timer""#),
    ] {
        let seconds = if name == "hangs" { 1 } else { 60 };
        world.settings(&json!({"deadlines": {"preflight": seconds}}));
        world.publish("1.4.0", ployzd);
        let start = Instant::now();
        let (found, error) = world.failed(&exact("1.4.0"));
        assert!(reason.split('|').any(|reason| reason == found), "{name}: {found}: {error}");
        assert!(error.contains(says), "{name}: {error}");
        assert!(!error.contains(|letter: char| letter.is_control()), "{name}: {error:?}");
        assert!(start.elapsed() < Duration::from_secs(45), "{name}");
    }
}

#[test]
fn a_release_that_is_too_old_to_answer_keeps_the_units_that_are_there() {
    let alone = alone();
    let world = world(&alone);
    let unit = fs::read(world.host.unit("ployz.service")).unwrap();
    let old = "#!/bin/sh\n[ \"$*\" = version ] || exit 2\necho ployzd 1.2.0\n";
    world.publish("1.2.0", old);
    let record = world.installed(&exact("1.2.0"));
    assert!(record.warnings.iter().any(|text| text.contains("too old to describe its units")), "{record:#?}");
    assert_eq!(fs::read(world.host.unit("ployz.service")).unwrap(), unit);
}

#[test]
fn a_new_binary_can_do_nothing_before_it_is_trusted() {
    let alone = alone();
    let world = world(&alone);
    let witness = world.root().join("witness");
    fs::create_dir(&witness).unwrap();
    fs::set_permissions(&witness, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let at = witness.display();
    // A length that no other process sleeps for.
    let nap = format!("9{:07}", std::process::id());
    // What it sees is part of the refusal.
    let does = format!(
        "( (echo x >{at}/file); mkdir {at}/directory; ln -s text {at}/link; mkfifo {at}/fifo) 2>/dev/null\n\
         (echo x >/dev/null) || echo no-null >&2\n\
         for line in $(env); do case $line in PATH=*|LC_ALL=*|PWD=*|_=*|OLDPWD=*|SHLVL=*) ;; *) echo env-$line >&2 ;; esac; done\n\
         [ \"$PWD\" = / ] || echo elsewhere >&2\n\
         while read -r key value; do case $key in NoNewPrivs:|CapEff:|CapPrm:|CapInh:|CapAmb:) echo $key$value >&2 ;; esac; done </proc/self/status\n\
         (trap '' HUP TERM; sleep {nap}) &\nexit 9\n"
    );
    world.publish("1.4.0", script_that(&does, "1.4.0", UNITS));
    let (reason, error) = world.failed(&exact("1.4.0"));
    assert_eq!(reason, "does_not_run");
    let seen = error.split("it said: ").nth(1).unwrap();
    let none = "0000000000000000";
    let caps = ["CapInh", "CapPrm", "CapEff", "CapAmb"].map(|set| format!("{set}:{none}"));
    let expected: Vec<_> = caps.into_iter().chain(["NoNewPrivs:1".to_owned()]).collect();
    assert_eq!(seen.split_whitespace().collect::<Vec<_>>(), expected, "{error}");
    let made: Vec<_> = fs::read_dir(&witness).unwrap().map(|entry| entry.unwrap().path()).collect();
    if has_landlock() {
        assert_eq!(made, Vec::<std::path::PathBuf>::new(), "it has made something");
    }
    for file in made.iter().filter(|path| path.ends_with("file")) {
        assert_eq!(fs::metadata(file).unwrap().len(), 0, "a name, and not a byte");
    }
    assert_eq!(still_there(&world, &nap), 0, "what it started has ended with it");
}

/// Whether this kernel can forbid a process to make names.
fn has_landlock() -> bool {
    use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset.handle_access(AccessFs::WriteFile).and_then(Ruleset::create).is_ok()
}

/// Processes that still run something of the world's, or sleep for so long.
fn still_there(world: &World, nap: &str) -> usize {
    let root = world.root().display().to_string();
    let commands = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words = command.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect::<Vec<_>>();
        words.iter().any(|word| word.contains(&root)) || (words[0] == "sleep" && words[1] == nap)
    });
    commands.count()
}

#[test]
fn other_children_of_the_installer_are_left_alone() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    // As a shell leaves its background jobs to the program that it becomes.
    let mut before = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    world.installed(&exact("1.4.0"));
    let runs = matches!(before.try_wait(), Ok(None));
    let _ = (before.kill(), before.wait());
    assert!(runs, "it was here before, and is nobody's orphan");
}

#[test]
fn what_is_in_the_way_of_a_file_is_named() {
    let alone = alone();
    for (name, text) in [("link", "is not a regular file"), ("directory", "is not a regular file")] {
        let world = World::new(&alone);
        world.release("1.4.0");
        if name == "link" {
            std::os::unix::fs::symlink("/opt/ployz/ployzd", world.host.installed()).unwrap();
        } else {
            fs::create_dir(world.host.installed()).unwrap();
        }
        let (reason, error) = world.failed(&exact("1.4.0"));
        assert_eq!(reason, "host", "{name}: {error}");
        assert!(error.contains(text) && error.contains("usr/local/bin/ployzd"), "{name}: {error}");
    }
    // A file where a directory must be: each place is named when it is come to.
    for place in
        ["usr/local/lib/ployz", "usr/local/bin", "usr/local/lib/ployz/staging", "usr/local/lib/sysusers.d"]
    {
        let world = World::new(&alone);
        world.release("1.4.0");
        let _ = fs::remove_dir(world.root().join(place));
        fs::create_dir_all(world.root().join(place).parent().unwrap()).unwrap();
        fs::write(world.root().join(place), "").unwrap();
        let record = world.install(&exact("1.4.0")).unwrap();
        let text = format!("{:?}{:?}", record.outcome, record.warnings);
        assert!(text.contains(place), "{place}: {text}");
        assert_eq!(world.left_over(), NONE, "{place}");
    }
}

#[test]
fn a_switch_that_stops_half_way_says_what_was_switched() {
    let alone = alone();
    let world = world(&alone);
    world.release("1.4.0");
    let unit = world.host.unit("ployz.service");
    fs::remove_file(&unit).unwrap();
    fs::create_dir(&unit).unwrap();
    let record = world.install(&exact("1.4.0")).unwrap();
    let Some(ployz::install::attempt::Outcome::Failed { stage, reason, error, help, .. }) = &record.outcome
    else {
        panic!("{record:#?}")
    };
    assert_eq!((stage.to_string().as_str(), reason.as_str()), ("activating", "activate"), "{error}");
    assert!(error.contains("writing ployz.service"), "{error}");
    assert_eq!(record.installation, Installation::Replaced, "what was switched is not denied");
    assert_eq!(record.switched, [world.host.installed().display().to_string()]);
    assert!(help.iter().any(|line| line.contains("journalctl")), "{help:?}");
    assert_eq!(fs::read(world.host.installed()).unwrap(), script("1.4.0"), "nothing is rolled back");
    assert_eq!(world.left_over(), NONE);

    fs::remove_dir(&unit).unwrap();
    let record = world.installed(&exact("1.4.0"));
    assert_eq!(record.switched, [unit.display().to_string()], "asked again, it goes on");
}
