//! A server that takes whatever it is sent: what is left is the cost of the engine and of Postgres.

use std::io;
use std::net::TcpStream;

use crate::bed::Target;
use crate::http::{self, Messages};

/// Good for every question of the engine: a write that is done, a model that is there, a tuple that is not.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{\"tuples\":[]}";

/// Starts one, which is there until the process ends.
pub fn start() -> Target {
    let id = "01ARZ3NDEKTSV4RRFFQ69G5FAV".to_owned();
    Target { api_url: http::serve(take), store_id: id.clone(), model_id: id }
}

fn take(stream: TcpStream) -> io::Result<()> {
    let mut requests = Messages::of(stream);
    while requests.next()?.is_some() {
        requests.answer(ANSWER)?;
    }
    Ok(())
}
