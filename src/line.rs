//! One line over a connection, bounded in size and time, as the doors take their requests.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// For a whole line.
const LINE: Duration = Duration::from_secs(5);

/// Why what came is no request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LineError {
    /// It ended before its line did.
    #[error("the request was cut off after {0} bytes")]
    CutOff(usize),
    /// Its line did not end in time.
    #[error("the request was not complete within {} s", LINE.as_secs())]
    Slow,
    /// Its line does not end.
    #[error("the request is longer than {0} bytes")]
    Long(usize),
    /// Something follows the line.
    #[error("the request is more than one line")]
    More,
    /// It is not what may be asked.
    #[error("the request is not understood: {0}")]
    Content(String),
    /// The connection broke.
    #[error("reading the request: {0}")]
    Broken(String),
}

/// Reads one line of at most `most` bytes, its newline included.
pub(crate) fn read_line(connection: &mut UnixStream, most: usize) -> Result<Vec<u8>, LineError> {
    let broken = |e: io::Error| LineError::Broken(e.to_string());
    let started = Instant::now();
    let mut line = Vec::new();
    let mut buffer = vec![0; most + 1];
    loop {
        let left = LINE.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Err(LineError::Slow);
        }
        connection.set_read_timeout(Some(left)).map_err(broken)?;
        match connection.read(&mut buffer[line.len()..]) {
            Ok(0) => return Err(LineError::CutOff(line.len())),
            Ok(n) => {
                let from = line.len();
                line.extend_from_slice(&buffer[from..from + n]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(LineError::Slow);
            }
            Err(e) => return Err(broken(e)),
        }
        match line.iter().position(|byte| *byte == b'\n') {
            Some(end) if end >= most => return Err(LineError::Long(most)),
            Some(end) if end + 1 < line.len() => return Err(LineError::More),
            Some(_) => return Ok(line),
            None if line.len() >= most => return Err(LineError::Long(most)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use super::*;

    #[test]
    fn a_line_is_bounded_and_is_the_only_one() {
        const MOST: usize = 4096;
        let read = |bytes: &[u8]| {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(bytes).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            read_line(&mut ours, MOST)
        };
        assert_eq!(read(b"{}\n").unwrap(), b"{}\n");
        assert_eq!(read(b"").unwrap_err(), LineError::CutOff(0));
        assert_eq!(read(b"{}").unwrap_err(), LineError::CutOff(2));
        assert_eq!(read(b"{}\n{}\n").unwrap_err(), LineError::More);
        let mut longest = vec![b' '; MOST];
        assert_eq!(read(&longest).unwrap_err(), LineError::Long(MOST));
        longest[MOST - 1] = b'\n';
        assert_eq!(read(&longest).unwrap().len(), MOST);
        longest.insert(0, b' ');
        assert_eq!(read(&longest).unwrap_err(), LineError::Long(MOST));
    }
}
