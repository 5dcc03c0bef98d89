//! Dates as chat templates write them.
//!
//! It decides what each `strftime` directive means, as in Python's C locale. It does not know the time: the caller
//! passes it in.

use std::fmt::Write;

/// A moment in the caller's time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    /// Calendar year.
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    /// 0 to 23.
    pub hour: u32,
    /// 0 to 59.
    pub minute: u32,
    /// 0 to 60.
    pub second: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl LocalTime {
    /// The moment `seconds` after the start of 1970 (UTC), leap seconds not counted.
    pub fn from_unix_seconds(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let rest = seconds.rem_euclid(86_400);
        // Days are counted from 1 March of year 0, in 400-year eras, so that the leap day comes last in its year.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let narrow = |value: i64| u32::try_from(value).unwrap_or(0);
        Self {
            year: i32::try_from(year_of_era + era * 400 + i64::from(month <= 2)).unwrap_or(i32::MAX),
            month: narrow(month),
            day: narrow(day_of_year - (153 * month_from_march + 2) / 5 + 1),
            hour: narrow(rest / 3_600),
            minute: narrow(rest / 60 % 60),
            second: narrow(rest % 60),
        }
    }

    /// The moment in the words of a `strftime` format. Directives that are not known are written as they stand.
    pub fn format(&self, format: &str) -> String {
        let mut text = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            match chars.next() {
                Some('-') => self.directive(chars.next(), false, &mut text),
                directive => self.directive(directive, true, &mut text),
            }
        }
        text
    }

    fn directive(&self, directive: Option<char>, padded: bool, text: &mut String) {
        let hour12 = match self.hour % 12 {
            0 => 12,
            hour => hour,
        };
        let number = |value: u32| {
            if padded { format!("{value:02}") } else { value.to_string() }
        };
        let written = match directive {
            Some('d') => number(self.day),
            Some('m') => number(self.month),
            Some('H') => number(self.hour),
            Some('I') => number(hour12),
            Some('M') => number(self.minute),
            Some('S') => number(self.second),
            Some('y') => number(self.year.rem_euclid(100).unsigned_abs()),
            Some('Y') => self.year.to_string(),
            Some('j') if padded => format!("{:03}", self.day_of_year()),
            Some('j') => self.day_of_year().to_string(),
            Some('B') => self.month_name().to_owned(),
            Some('b' | 'h') => self.month_name().chars().take(3).collect(),
            Some('A') => self.weekday_name().to_owned(),
            Some('a') => self.weekday_name().chars().take(3).collect(),
            Some('w') => self.weekday().to_string(),
            Some('u') => (if self.weekday() == 0 { 7 } else { self.weekday() }).to_string(),
            Some('p') => (if self.hour < 12 { "AM" } else { "PM" }).to_owned(),
            Some('F') => self.format("%Y-%m-%d"),
            Some('T') => self.format("%H:%M:%S"),
            Some('R') => self.format("%H:%M"),
            Some('D') => self.format("%m/%d/%y"),
            Some('e') => format!("{:>2}", self.day),
            Some('c') => self.format("%a %b %e %H:%M:%S %Y"),
            Some('x') => self.format("%m/%d/%y"),
            Some('X') => self.format("%H:%M:%S"),
            Some('f') => "000000".to_owned(),
            Some('z' | 'Z') => String::new(),
            Some('%') => "%".to_owned(),
            other => {
                let _ = write!(text, "%{}", if padded { "" } else { "-" });
                other.map(String::from).unwrap_or_default()
            }
        };
        text.push_str(&written);
    }

    fn month_name(&self) -> &'static str {
        MONTHS.get((self.month as usize).wrapping_sub(1)).copied().unwrap_or("")
    }

    fn weekday_name(&self) -> &'static str {
        WEEKDAYS[self.weekday()]
    }

    /// 0 for Sunday.
    fn weekday(&self) -> usize {
        let shift = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = i64::from(self.year) - i64::from(self.month < 3);
        let month = shift.get((self.month as usize).wrapping_sub(1)).copied().unwrap_or(0);
        let day = year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + month + i64::from(self.day);
        usize::try_from(day.rem_euclid(7)).unwrap_or(0)
    }

    fn day_of_year(&self) -> u32 {
        let is_leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let leap = u32::from(is_leap && self.month > 2);
        before.get((self.month as usize).wrapping_sub(1)).copied().unwrap_or(0) + leap + self.day
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_like_python() {
        let time = LocalTime::from_unix_seconds(1_752_152_405);
        assert_eq!(time.format("%d %b %Y"), "10 Jul 2025");
        assert_eq!(
            time.format("%A, %B %-d, %Y %H:%M:%S %I %p %j %y%%"),
            "Thursday, July 10, 2025 13:00:05 01 PM 191 25%"
        );
        assert_eq!(time.format("%Q %-"), "%Q %-");
        assert_eq!(LocalTime::from_unix_seconds(951_782_400).format("%F %a %j"), "2000-02-29 Tue 060");
        assert_eq!(LocalTime::from_unix_seconds(-1).format("%F %T"), "1969-12-31 23:59:59");
        assert_eq!(LocalTime::from_unix_seconds(0).format("%F %T %a"), "1970-01-01 00:00:00 Thu");
    }
}
