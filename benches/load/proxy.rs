//! A server before OpenFGA that notes when each write was asked for, and when OpenFGA had answered it.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use serde_json::Value;

use crate::bed::Target;
use crate::http::{self, Messages, body};

/// Starts one, which is there until the process ends.
pub fn start(openfga: &Target) -> Proxy {
    let notes = Arc::default();
    let address = openfga.api_url.trim_start_matches("http://").to_owned();
    let url = http::serve({
        let notes = Arc::clone(&notes);
        move |stream| pass_on(stream, &address, &notes)
    });
    Proxy { url, notes }
}

pub struct Proxy {
    pub url: String,
    notes: Arc<Mutex<Vec<Note>>>,
}

/// A write that was accepted.
struct Note {
    body: Vec<u8>,
    at: Answered,
}

/// When a write was asked for, and when it was answered.
#[derive(Clone, Copy)]
pub struct Answered {
    pub asked: Micros,
    pub answered: Micros,
}

/// Of the machine's clock, which Postgres reads, too.
pub type Micros = i64;

pub fn now() -> Micros {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is later than 1970");
    since.as_micros() as Micros
}

impl Proxy {
    /// When each object's tuple was first written, of all writes since the last time.
    pub fn take(&self) -> HashMap<String, Answered> {
        let notes = std::mem::take(&mut *self.notes.lock().expect("no holder panics"));
        let mut by_object = HashMap::new();
        for Note { body, at } in notes {
            let body: Value = serde_json::from_slice(&body).expect("the engine sends JSON");
            for key in body["writes"]["tuple_keys"].as_array().into_iter().flatten() {
                by_object.entry(key["object"].as_str().expect("a key has an object").to_owned()).or_insert(at);
            }
        }
        by_object
    }
}

fn pass_on(stream: TcpStream, address: &str, notes: &Mutex<Vec<Note>>) -> io::Result<()> {
    let openfga = TcpStream::connect(address)?;
    openfga.set_nodelay(true)?;
    let mut to_openfga = openfga.try_clone()?;
    let (mut requests, mut answers) = (Messages::of(stream), Messages::of(openfga));
    while let Some(request) = requests.next()? {
        let asked = now();
        to_openfga.write_all(request)?;
        let Some(answer) = answers.next()? else { return Ok(()) };
        let answered = now();
        let head = String::from_utf8_lossy(request.split(|byte| *byte == b'\r').next().unwrap_or_default());
        if head.contains("/write ") && answer.starts_with(b"HTTP/1.1 200") {
            let body = request[body(request).unwrap_or_default()..].to_vec();
            notes.lock().expect("no holder panics").push(Note { body, at: Answered { asked, answered } });
        }
        requests.answer(answer)?;
    }
    Ok(())
}
