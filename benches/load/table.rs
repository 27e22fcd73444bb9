//! What a scenario found out, as text or as JSON; and medians.

use serde_json::{Map, Value, json};

pub struct Table {
    title: String,
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

impl Table {
    pub fn new<const N: usize>(title: &str, columns: [&str; N]) -> Self {
        Self { title: title.to_owned(), columns: columns.map(String::from).into(), rows: Vec::new() }
    }

    /// A cell for each column: a text, a number, or `null` where there is nothing to say.
    pub fn row<const N: usize>(&mut self, cells: [Value; N]) {
        assert_eq!(N, self.columns.len());
        self.rows.push(cells.into());
    }

    pub fn print(&self, json: bool) {
        if json {
            let object = |row: &Vec<Value>| -> Map<String, Value> {
                self.columns.iter().cloned().zip(row.iter().cloned()).collect()
            };
            let rows: Vec<_> = self.rows.iter().map(object).collect();
            return println!("{}", json!({"table": self.title, "rows": rows}));
        }
        println!("\n{}", self.title);
        let cells: Vec<Vec<String>> = self.rows.iter().map(|row| row.iter().map(shown).collect()).collect();
        let lines = || std::iter::once(&self.columns).chain(&cells);
        let width = |column: usize| lines().map(|line| line[column].chars().count()).max().unwrap_or_default();
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for line in lines() {
            print!("  {:<1$}", line[0], widths[0]);
            line.iter().zip(&widths).skip(1).for_each(|(cell, width)| print!("  {cell:>width$}"));
            println!();
        }
    }
}

/// With three digits, or as a whole number with its thousands apart.
fn shown(cell: &Value) -> String {
    match cell {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        cell => match cell.as_f64().unwrap_or(f64::NAN) {
            number if number.fract() == 0.0 || number.abs() >= 100.0 => {
                let digits = format!("{:.0}", number.abs());
                let thousands: Vec<&str> =
                    digits.as_bytes().rchunks(3).rev().map(|it| std::str::from_utf8(it).unwrap_or_default()).collect();
                format!("{}{}", if number < 0.0 { "-" } else { "" }, thousands.join(","))
            }
            number if number.abs() >= 10.0 => format!("{number:.1}"),
            number => format!("{number:.2}"),
        },
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) { (values[middle - 1] + values[middle]) / 2.0 } else { values[middle] }
}

/// What is printed of a number: no more digits than were measured.
pub fn rounded(number: f64) -> Value {
    json!((number * 1_000.0).round() / 1_000.0)
}
