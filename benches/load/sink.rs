//! A server that takes whatever it is sent: what is left is the cost of the engine and of Postgres.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

use crate::bed::Target;

/// Good for every question of the engine: a write that is done, a model that is there, a tuple that is not.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{\"tuples\":[]}";

/// Starts one, which is there until the process ends. A thread for each connection: nothing is cheaper for a few.
pub fn start() -> Target {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // How a connection ends is its client's affair.
            thread::spawn(move || drop(serve(stream)));
        }
    });
    let id = "01ARZ3NDEKTSV4RRFFQ69G5FAV".to_owned();
    Target { api_url: format!("http://127.0.0.1:{port}"), store_id: id.clone(), model_id: id }
}

fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; 1 << 20];
    let mut filled = 0;
    loop {
        filled += match stream.read(&mut buffer[filled..])? {
            0 => return Ok(()),
            read => read,
        };
        while let Some(length) = request_length(&buffer[..filled]).filter(|length| *length <= filled) {
            buffer.copy_within(length..filled, 0);
            filled -= length;
            stream.write_all(ANSWER)?;
        }
    }
}

/// None where its head has not come yet.
fn request_length(received: &[u8]) -> Option<usize> {
    let head = received.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&received[..head]).ok()?;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    Some(head + length.unwrap_or(0))
}
