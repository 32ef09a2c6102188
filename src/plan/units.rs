//! Bytes as people compare them with what vendors state: decimal, so that they divide by GB/s.

/// Bytes in the largest decimal unit, with three or four digits.
#[must_use]
pub fn gigabytes(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let bytes = bytes as f64;
    match units.into_iter().find(|(_, size)| bytes >= *size) {
        Some(("TB", size)) => format!("{:.2} TB", bytes / size),
        Some((unit, size)) => format!("{:.1} {unit}", bytes / size),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_decimal() {
        assert_eq!(gigabytes(95_721_357_312), "95.7 GB");
        assert_eq!(gigabytes(1_531_541_716_992), "1.53 TB");
        assert_eq!((gigabytes(2144), gigabytes(999), gigabytes(0)), ("2.1 kB".into(), "999 B".into(), "0 B".into()));
    }
}
