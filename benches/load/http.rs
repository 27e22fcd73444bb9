//! As much of HTTP as a server on loopback needs that only ever meets the engine and OpenFGA.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// Starts a server, which is there until the process ends, and says where it is. A thread for each connection: nothing
/// is cheaper for a few.
pub fn serve(connection: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = connection.clone();
            // How it ends is the client's affair.
            thread::spawn(move || stream.set_nodelay(true).and_then(|()| connection(stream)));
        }
    });
    format!("http://127.0.0.1:{port}")
}

/// The messages that arrive on a connection, one after the other: none is asked for before the last one was answered.
pub struct Messages {
    stream: TcpStream,
    received: Vec<u8>,
    filled: usize,
}

impl Messages {
    pub fn of(stream: TcpStream) -> Self {
        Self { stream, received: vec![0; 1 << 20], filled: 0 }
    }

    /// The next one, whole. None where the connection has ended.
    pub fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.filled = 0;
        while !is_whole(&self.received[..self.filled]) {
            match self.stream.read(&mut self.received[self.filled..])? {
                0 => return Ok(None),
                read => self.filled += read,
            }
        }
        Ok(Some(&self.received[..self.filled]))
    }

    pub fn answer(&mut self, message: &[u8]) -> io::Result<()> {
        self.stream.write_all(message)
    }
}

/// The position of the body, once the head is there.
pub fn body(message: &[u8]) -> Option<usize> {
    Some(message.windows(4).position(|window| window == b"\r\n\r\n")? + 4)
}

fn is_whole(message: &[u8]) -> bool {
    let Some(body) = body(message) else { return false };
    let head = String::from_utf8_lossy(&message[..body]).to_ascii_lowercase();
    if head.contains("transfer-encoding: chunked") {
        return message.ends_with(b"0\r\n\r\n");
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    message.len() >= body + length.unwrap_or(0)
}
