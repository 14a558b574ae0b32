//! Logins over the network, which can be cut.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::lab::{caches, lab, scratch};
use crate::machine::Machine;
use crate::run::USUAL;

/// A login of root that runs a command. Dropping it cuts it.
#[derive(Debug)]
pub struct Login {
    client: Child,
    output: PathBuf,
}

impl Machine {
    /// Logs in as root, with a terminal or without one, runs a command line, and goes on.
    #[track_caller]
    pub fn login(&self, terminal: bool, command: &str) -> Login {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let address = lab().machine(USUAL, &["ip", self.name()]).expect(0);
        let (key, to) = (caches().join("ssh/id_ed25519"), format!("root@{}", address.text()));
        let key = key.display().to_string();
        let mut words = vec!["lab", "ssh", "-i", &key, "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"];
        // The machine is new each time, and its key with it.
        words.extend(["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]);
        words.extend([
            "-o",
            "GlobalKnownHostsFile=/dev/null",
            if terminal { "-tt" } else { "-T" },
            &to,
            command,
        ]);
        let words = lab().words(&words);
        let output = scratch().join(format!("login-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let heard = File::create(&output).expect("making an output file");
        let client = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stderr(heard.try_clone().expect("a second descriptor"))
            .stdout(heard)
            .spawn()
            .expect("starting ssh");
        Login { client, output }
    }
}

impl Login {
    /// Kills the client: the connection is gone without a word.
    pub fn cut(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }

    /// Whether the client still runs.
    pub fn runs(&mut self) -> bool {
        self.client.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// What was heard up to now.
    pub fn heard(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }
}

impl Drop for Login {
    fn drop(&mut self) {
        self.cut();
    }
}
