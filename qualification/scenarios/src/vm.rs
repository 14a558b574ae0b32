//! A machine with a kernel and a disk of its own (`qualification/vm`), whose power can really be cut.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::lab::{caches, note, repository};
use crate::look;
use crate::machine::quoted;
use crate::releases::Release;
use crate::run::{Run, USUAL, host_within};

/// Ends with the process that holds the other end of its standard input, however that ends: then the machines are
/// gone. It keeps the lock until then, so that the next run of the same scenario waits, and sweeps what is left of one
/// whose janitor was killed too.
const JANITOR: &str = r#"
    vm=$1
    exec 9>"$2" # never removed: a lock that is removed has two holders
    flock -w 600 9 || { echo "scenarios: the machines in $VM_DIR are in use by another process" >&2; exit 1; }
    "$vm" destroy-all || exit
    echo ready
    cat >/dev/null
    "$vm" destroy-all
"#;

/// Building the image takes three minutes, and longer beside other work.
const IMAGE: Duration = Duration::from_secs(900);

/// The machines of one scenario, gone when the last of them is.
#[derive(Debug)]
struct Machines {
    dir: PathBuf,
    /// Its standard input is closed by the kernel when this process ends.
    janitor: Child,
}

/// A machine. Dropping it destroys it, and shows its console and journal when the test has failed.
#[derive(Debug)]
pub struct Vm {
    name: String,
    machines: Arc<Machines>,
}

impl Machines {
    fn of(scenario: &str) -> Self {
        let dir = caches().join(format!("vmlab-{scenario}"));
        let vm = repository().join("qualification/vm");
        fs::create_dir_all(caches()).expect("making the directory of caches");
        let mut janitor = Command::new("sh")
            .args(["-c", JANITOR, "janitor"])
            .arg(&vm)
            .arg(caches().join(format!(".vmlab-{scenario}.lock")))
            .env("VM_DIR", &dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C ends the test, not its janitor.
            .process_group(0)
            .spawn()
            .expect("starting the janitor");
        let mut said = String::new();
        let stdout = janitor.stdout.take().expect("the janitor's standard output");
        BufReader::new(stdout).read_line(&mut said).expect("hearing the janitor");
        assert_eq!(said.trim(), "ready", "machines can't be kept in {}: see above", dir.display());
        Self { dir, janitor }
    }

    #[track_caller]
    fn vm(&self, bound: Duration, words: &[&str]) -> Run {
        let script = repository().join("qualification/vm");
        let mut all =
            vec!["env".into(), format!("VM_DIR={}", self.dir.display()), script.display().to_string()];
        all.extend(words.iter().map(|word| (*word).to_owned()));
        host_within(bound, &all)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
    }
}

impl Vm {
    /// A machine that has just booted, alone in a scenario of this name.
    #[track_caller]
    pub fn booted(scenario: &str) -> Self {
        Self::booted_of(scenario, "plain")
    }

    /// The same of another flavour of `qualification/vm-image`.
    #[track_caller]
    pub fn booted_of(scenario: &str, flavour: &str) -> Self {
        let machines = Arc::new(Machines::of(scenario));
        machines.vm(IMAGE, &["image", flavour]).ok();
        let vm = Self { name: scenario.to_owned(), machines };
        vm.ask(USUAL, "create", &["--image", flavour]).ok();
        vm.restore("booted");
        vm
    }

    /// Another machine, off, with the disk and the snapshots of this one, which must be off too.
    #[track_caller]
    pub fn copy(&self, name: &str) -> Self {
        self.ask(USUAL, "copy", &[name]).ok();
        Self { name: name.to_owned(), machines: Arc::clone(&self.machines) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs a command line inside, by `bash -c` as root, at most two minutes. 255 when its power was cut meanwhile.
    #[track_caller]
    pub fn run(&self, command: &str) -> Run {
        let words = ["sh", "--timeout", "120", &self.name, "bash", "-c", command];
        Run { command: command.to_owned(), ..self.machines.vm(Duration::from_secs(150), &words) }
    }

    /// Writes a file inside.
    #[track_caller]
    pub fn write(&self, path: &str, text: &str) {
        self.run(&format!("printf %s {} >{path}", quoted(text))).ok();
    }

    /// Copies a file in, with its mode.
    #[track_caller]
    pub fn put(&self, file: &Path, path: &str) {
        self.ask(USUAL, "put", &[&file.display().to_string(), path]).ok();
    }

    /// Copies a release in; returns the arguments that install it from there.
    #[track_caller]
    pub fn deliver(&self, release: &Release) -> String {
        let dir = format!("/root/{}", release.version);
        self.run(&format!("mkdir -p {dir}")).ok();
        let archive = format!("{dir}/ployzd_linux_amd64.tar.gz");
        self.put(&release.archive(), &archive);
        self.put(&release.checksums(), &format!("{dir}/checksums.txt"));
        format!("--version {} --archive {archive} --checksums {dir}/checksums.txt", release.version)
    }

    /// Keeps it as it is now, under a name.
    #[track_caller]
    pub fn snapshot(&self, tag: &str) {
        self.ask(USUAL, "snapshot", &[tag]).ok();
    }

    /// Puts it back to what it was then, running.
    #[track_caller]
    pub fn restore(&self, tag: &str) {
        self.ask(USUAL, "restore", &[tag]).ok();
    }

    /// Cuts its power, if it has any left.
    #[track_caller]
    pub fn cut(&self) {
        self.ask(USUAL, "cut", &[]).ok();
    }

    /// Boots it from its disk as that is now.
    #[track_caller]
    pub fn boot(&self) {
        self.ask(USUAL, "boot", &[]).ok();
        let _ = self.ask(Duration::from_secs(200), "ready", &[]).expect(0);
    }

    /// A verb of `qualification/vm` about it.
    #[track_caller]
    fn ask(&self, bound: Duration, verb: &str, words: &[&str]) -> Run {
        let mut all = vec![verb, self.name.as_str()];
        all.extend(words);
        self.machines.vm(bound, &all)
    }

    /// Everything that tells what happened here.
    fn show(&self) {
        let failed = ("failed units", "systemctl --failed --no-pager");
        for (title, command) in [failed].into_iter().chain(look::SECTIONS) {
            note(&format!("=== {}: {title}\n{}", self.name, self.run(command).both().trim_end()));
        }
        note(&format!("=== {}: console\n{}", self.name, self.ask(USUAL, "console", &[]).both().trim_end()));
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show();
        }
        let run = self.ask(USUAL, "destroy", &[]);
        if run.code != 0 {
            note(&format!("{} is not destroyed:\n{}", self.name, run.shown()));
        }
    }
}
