"""Whole user turns, put together from patterns and words: the other seeds of varied conversations.

A small model that writes its own questions asks what is easy to go on from. People ask otherwise:
for a summary, a translation, a program, a sum with a story around it. Each pattern here is such a
request with slots; words for the slots are drawn, so that a few hundred lines make more turns than
any run reads. Everything is general and written for this file; nothing comes from a benchmark.
Knows no target and no format. Order matters: a recipe draws by index.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

SLOT = re.compile(r"\{(\w+)\}")

WORDS: dict[str, tuple[str, ...]] = {
    "topic": (
        "renewable energy", "coral reefs", "the printing press", "electric cars", "black holes",
        "the water cycle", "urban gardening", "the stock market", "antibiotics", "volcanoes",
        "the Roman Empire", "machine learning", "climate change", "the human heart", "jazz music",
        "plate tectonics", "public transport", "the French Revolution", "vaccines", "democracy",
        "the Silk Road", "sleep", "bees", "inflation", "evolution", "space travel", "chess",
        "the Industrial Revolution", "nutrition", "the internet", "glaciers", "photography",
        "artificial intelligence", "ancient Egypt", "free trade", "earthquakes", "immune cells",
        "the Renaissance", "nuclear power", "social media", "recycling", "bread making", "tides",
        "the Cold War", "migration of birds", "remote work", "gravity", "the Great Depression",
        "human rights", "DNA", "rainforests", "poetry", "supply and demand", "the Moon", "tea",
        "cybersecurity", "stoicism", "magnetism", "the United Nations", "batteries", "wolves",
        "architecture", "the Olympic Games", "memory", "monetary policy", "rivers", "whales",
        "the solar system", "mental health", "digestion", "globalization", "music theory",
        "relativity", "the Black Death", "desertification", "semiconductors", "childhood education",
        "entropy", "the Mongol Empire", "ocean currents", "copyright law", "the labor market",
    ),
    "field": (
        "physics", "chemistry", "biology", "economics", "philosophy", "psychology", "history",
        "computer science", "medicine", "linguistics", "astronomy", "sociology", "geology",
        "law", "engineering", "ecology", "political science", "statistics", "art history",
    ),
    "concept": (
        "natural selection", "opportunity cost", "momentum", "photosynthesis", "osmosis",
        "the Doppler effect", "game theory", "cognitive dissonance", "comparative advantage",
        "catalysis", "recursion", "utilitarianism", "half-life", "a chemical bond", "fermentation",
        "the placebo effect", "elasticity of demand", "Newton's third law", "a hash table",
        "the greenhouse effect", "mitosis", "separation of powers", "buoyancy", "a monopoly",
        "the uncertainty principle", "fiscal policy", "homeostasis", "refraction", "big O notation",
        "the social contract", "radioactive decay", "compound interest", "a food web", "inertia",
        "entanglement of particles", "gross national income", "enzymes", "the speed of sound",
        "existentialism", "a binary search tree", "surface tension", "checks and balances",
    ),
    "place": (
        "Lisbon", "Kyoto", "the Scottish Highlands", "New Zealand", "Marrakesh", "Iceland",
        "Vancouver", "Buenos Aires", "the Greek islands", "Vienna", "Cape Town", "Vietnam",
        "Mexico City", "Norway", "Istanbul", "Costa Rica", "Prague", "Tasmania", "Seoul", "Peru",
        "Chicago", "Sicily", "Kenya", "the Rocky Mountains", "Berlin", "Jordan", "Montreal",
    ),
    "person": (
        "Albert Einstein", "Cleopatra", "Leonardo da Vinci", "Marie Curie", "Steve Jobs",
        "William Shakespeare", "Sherlock Holmes", "Nelson Mandela", "Mozart", "Abraham Lincoln",
        "Winston Churchill", "Ada Lovelace", "Socrates", "Batman", "Isaac Newton", "Napoleon",
        "Charles Darwin", "Captain Nemo", "Gandalf", "Jane Austen", "Bill Gates", "Yoda",
        "Oprah Winfrey", "Galileo", "Robin Hood", "Queen Victoria", "Nikola Tesla", "Buddha",
    ),
    "job": (
        "a doctor", "a chef", "a history teacher", "a travel guide", "a lawyer", "a mechanic",
        "a fitness coach", "a financial adviser", "a detective", "a gardener", "a journalist",
        "a software engineer", "a career counselor", "a film critic", "a pirate", "a librarian",
        "an astronaut", "a math tutor", "a nutritionist", "a job interviewer", "a poet", "a robot",
    ),
    "name": (
        "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Isabel", "Jack",
        "Karen", "Leo", "Maya", "Nathan", "Olivia", "Peter", "Rosa", "Sam", "Tina", "Victor",
        "Wendy", "Yusuf", "Zoe", "Paul", "Lucy", "Oscar", "Ruth", "Martin", "Nina", "George",
    ),
    "thing": (
        "apples", "books", "pencils", "cookies", "marbles", "stickers", "tickets", "eggs", "shirts",
        "oranges", "flowers", "candles", "stamps", "bottles of juice", "toy cars", "cupcakes",
        "balloons", "notebooks", "chairs", "bags of flour", "seashells", "photos", "coins", "fish",
    ),
    "small": ("2", "3", "4", "5", "6", "7", "8", "9"),
    "middle": ("10", "12", "14", "15", "16", "18", "20", "24", "25", "30", "36", "40", "45", "48"),
    "big": ("60", "72", "80", "90", "100", "120", "150", "180", "200", "240", "300", "450", "600"),
    "money": ("$2", "$3", "$4", "$5", "$8", "$10", "$12", "$15", "$20", "$25", "$40", "$50"),
    "percent": ("5%", "10%", "15%", "20%", "25%", "30%", "40%", "50%", "60%", "75%"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "language": ("Python", "Python", "JavaScript", "C++", "Java", "C", "Go", "Ruby", "Rust"),
    "task": (
        "checks whether a word is a palindrome", "sorts a list of numbers without library calls",
        "counts the words in a text file", "finds the largest number in a list",
        "computes the factorial of n", "removes duplicates from a list",
        "finds all prime numbers up to n", "merges two sorted lists", "reverses a string",
        "finds the most frequent character of a string", "computes the greatest common divisor",
        "prints the first n squares", "converts a decimal number to binary",
        "finds the shortest path in a grid", "implements a stack with push and pop",
        "reads a CSV file and computes the mean of a column", "checks if brackets are balanced",
        "finds two numbers in a list that add up to a target", "renames all files in a folder",
        "counts the vowels in a sentence", "implements binary search", "draws a random card",
        "finds the second largest element of an array", "implements a queue with two stacks",
        "downloads a web page and lists its links", "computes the nth term of a sequence",
        "simulates a dice game", "finds common elements of two arrays", "rotates a matrix",
        "validates an email address", "generates a random password", "keeps a list of contacts",
    ),
    "page": (
        "a button that changes the background color", "a contact form", "a clock",
        "a list of recipes", "a counter with two buttons", "a photo gallery", "a login form",
        "a quiz with three questions", "a table of countries and capitals", "a to-do list",
        "a calendar of the month", "a navigation bar", "a timer",
    ),
    "recipient": (
        "your manager", "a customer", "a new colleague", "your landlord", "a professor",
        "the city council", "a supplier", "your neighbor", "a hotel", "the school principal",
        "a friend who moved away", "an event organizer", "your team", "a job applicant",
    ),
    "matter": (
        "a delayed shipment", "the annual budget report", "a meeting next week", "a broken heater",
        "the results of a survey", "a summer internship", "a change of plans", "a refund",
        "feedback on a presentation", "a new project", "the office move", "a birthday party",
        "the marketing plan", "a recommendation letter", "the training schedule", "a late invoice",
    ),
    "product": (
        "two laptops", "two electric bikes", "two coffee machines", "a tablet and an e-reader",
        "two running shoes", "two cameras", "two vacuum cleaners", "two pairs of headphones",
        "two smart watches", "a gas stove and an electric one", "two streaming services",
    ),
    "work": (
        "Romeo and Juliet", "the Lion King", "Star Wars", "Moby Dick", "Jurassic Park", "Titanic",
        "the Mona Lisa", "Hamlet", "Frozen", "the Great Gatsby", "Friends", "the Simpsons",
        "Harry Potter", "Back to the Future", "Pride and Prejudice", "the Godfather", "Toy Story",
        "Game of Thrones", "Bohemian Rhapsody", "the Wizard of Oz", "Breaking Bad", "Casablanca",
        "The Office", "Lord of the Flies", "Swan Lake", "The Matrix", "Forrest Gump", "Dracula",
    ),
    "country": (
        "France", "Brazil", "Japan", "Canada", "India", "Germany", "Egypt", "Australia", "Spain",
        "China", "Italy", "Mexico", "South Africa", "Russia", "England", "Sweden", "Argentina",
        "Turkey", "Nigeria", "Poland", "Ireland", "Thailand", "Greece", "the Netherlands",
    ),
    "event": (
        "World War II", "the first Olympic Games", "the moon landing", "the Civil War",
        "the fall of the Berlin Wall", "the Boston Tea Party", "the last World Cup",
        "the Battle of Hastings", "the first Super Bowl", "the sinking of the Titanic",
        "the signing of the Magna Carta", "the discovery of penicillin", "the gold rush",
        "the first flight", "the great fire of London", "the Russian Revolution",
    ),
    "role": (
        "the main character", "the villain", "the younger brother", "the mother", "the teacher",
        "the king", "the best friend", "the doctor", "the grandmother", "the captain",
    ),
    "organ": (
        "the supreme court", "the senate", "the European Commission", "the central bank",
        "the city council", "the world bank", "the parliament", "the electoral college",
    ),
    "who": (
        "Der Bürgermeister", "Die junge Ärztin", "Unser Nachbar", "Die Regierung", "Der Verein",
        "Eine Gruppe von Studenten", "Das Museum", "Der Trainer", "Die Polizei", "Mein Bruder",
        "Das kleine Unternehmen", "Die Forscher", "Der Hersteller", "Ein Sprecher der Stadt",
        "Die Schule", "Der Minister", "Das Hotel", "Die Künstlerin", "Der Fahrer", "Die Bank",
    ),
    "does": (
        "hat gestern angekündigt", "will im nächsten Jahr versuchen", "konnte nicht verhindern",
        "hofft seit langem", "erklärte am Montag", "hat im Sommer beschlossen", "plant nun",
        "war sich sicher", "musste feststellen", "verspricht seinen Gästen", "warnt davor",
    ),
    "what": (
        "dass die Preise weiter steigen", "das alte Gebäude am Fluss zu renovieren",
        "dass viele Menschen mit der Bahn fahren", "eine neue Brücke zu bauen",
        "dass die Mannschaft am Samstag verliert", "mehr Geld für Bildung auszugeben",
        "dass das Wetter besser wird", "die Zahl der Besucher zu verdoppeln",
        "dass niemand verletzt wurde", "den Garten für alle zu öffnen",
        "dass ein Fehler gemacht worden war", "das Essen frisch und günstig anzubieten",
        "dass die Straße bis Freitag gesperrt bleibt", "Strom aus Wind und Sonne zu gewinnen",
        "dass die Kinder früh lesen lernen", "mit dem Rad durch die Berge zu fahren",
    ),
    "addition": (
        "", "", ", weil es in der Region wenig Arbeit gibt", ", obwohl die Kosten sehr hoch sind",
        ", wie eine Zeitung berichtet", " und sucht deshalb Hilfe", ", sagte sie am Abend",
        ", während die Nachbarn noch zögern", ", wenn alle zustimmen", " und freut sich darauf",
    ),
    "remark": (
        "Das Zimmer war sauber und das Frühstück ausgezeichnet .",
        "Besonders beliebt sind die Wanderwege rund um den See .",
        "Nach dem Spiel waren die Fans enttäuscht .",
        "Bitte vergessen Sie nicht , das Licht auszuschalten .",
        "Die Karten gelten auch für die Abendvorstellung .",
        "Vor dem Rathaus versammelten sich hunderte Menschen .",
        "Im Winter ist die Straße über den Pass oft geschlossen .",
        "Sie trug einen roten Mantel und lachte laut .",
        "Seit drei Jahren lebt die Familie auf einem Bauernhof .",
        "Mit dieser App können Sie Rechnungen schnell bezahlen .",
        "Die Studie zeigt , dass Bewegung gut für das Herz ist .",
        "Wer früh bucht , spart bis zu dreißig Prozent .",
        "Aus Sorge um die Umwelt verzichten viele auf das Auto .",
        "Das Konzert beginnt um acht Uhr und dauert zwei Stunden .",
    ),
    "review": (
        "The plot was slow, but the music was wonderful and the actors did their best.",
        "I left after twenty minutes. Nothing made sense and the jokes were old.",
        "A warm, funny story that my whole family enjoyed from start to finish.",
        "The phone works well, although the battery is empty by noon.",
        "Terrible service, cold food, and the waiter forgot our drinks.",
        "The best book I have read this year; the ending surprised me.",
        "It is an average hotel. The room was clean and the street was noisy.",
        "The shoes arrived late and in the wrong size, but the refund was quick.",
        "A brave film with a weak second half.",
        "Great value, easy to set up, and the support answered in an hour.",
    ),
    "fact": (
        "Who invented the telephone?", "Which gas do plants take in?", "Who painted Guernica?",
        "What is the boiling point of water?", "Which war ended in 1918?", "Who wrote Faust?",
        "Which planet has rings?", "What is a sonnet?", "When did the Western Roman Empire fall?",
        "What is the chemical symbol of gold?", "Who sculpted David?", "What causes rust?",
        "Who was the first emperor of Rome?", "What is Cubism?", "How many bones has an adult?",
    ),
    "novel": (
        "\"The Salt Road\" by Helen Marsh (1987) follows Idris, a trader, through the desert.",
        "In 2004 Tom Alvarez published \"Night Ferry\", in which the sailor June finds a lost map.",
        "\"Glass Orchard\", Priya Nair's novel of 1999, tells of the gardener Matteo and his son.",
        "Anton Weber's \"The Last Clockmaker\" appeared in 1932; its hero Elsa repairs a tower.",
        "\"Paper Moons\" (2015), written by Ruth Okoye, is about the teacher Daniel and his class.",
        "Detective Mara Lindt solves her first case in \"Cold Harbor\", Erik Dahl's book of 1978.",
        "\"A River Divided\" came out in 1961. Rosa Campos wrote it; its narrator is called Luis.",
    ),
}  # fmt: skip

PATTERNS: tuple[str, ...] = (
    # writing
    "Write an engaging blog post about a trip to {place}, with tips about food and sights.",
    "Write a short travel article about {place} for readers who have never been there.",
    "Write a professional email to {recipient} about {matter}. Be brief and polite.",
    "Draft a letter to {recipient} concerning {matter}.",
    "Compare {product} and recommend one of them.",
    "Compose a persuasive speech about {topic} for a school audience.",
    "Write a short story that begins with this sentence: {name} opened the old door.",
    "Describe a market in {place} so that the reader can smell and hear it.",
    "Write a poem of four stanzas about {topic}.",
    "Write a news article about {topic} with a headline, three paragraphs and names of people.",
    "Write a detailed news report about an event in {place} that involves {topic}.",
    "Write an encyclopedia article about {topic}, with years, names and numbers.",
    "Write a long report for a newspaper about {name}, {job}, who surprised everyone in {place}.",
    "Explain to {recipient} in a friendly note why {topic} matters to you.",
    # roles
    "Act as {job}. A visitor asks you about {topic}. What do you say?",
    "A dialogue: {name} meets {person} and they talk about {topic}.",
    "Imagine you are {job}. {name} asks for your advice on {matter}. Answer in character.",
    "You are {person}. Introduce yourself and tell us why {topic} is important to you.",
    "Take the role of {job} and explain {concept} to a child.",
    "Now you are {job}. My first question is: how do I learn more about {topic}?",
    # reasoning
    "{name} is taller than {name}, and {name} is taller than both. Who is the tallest? Explain.",
    "{name}, {name} and {name} share a flat. Two of them cook. How many pairs can cook? Explain.",
    "The lamp in the kitchen went out while {name} was reading. List possible reasons.",
    "Which word does not fit with the others: {topic}, {concept}, {place}, {job}? Explain.",
    "If all {thing} in a box are red and {name} takes {small} of them, what color do they have?",
    "{name} has {small} brothers, and each brother has {small} sisters. How is that possible?",
    "{name} left home at 8 in the morning facing the sun. In which direction did {name} walk?",
    "One day {name} says: all that I tell you is false. What is the problem with this sentence?",
    # mathematics
    "What is the area of a triangle with corners at (0, 0), ({small}, 0) and (0, {middle})?",
    "A class has {middle} students. {percent} of them like tea. How many is that? Explain.",
    "Solve for x: {small}x + {middle} = {big}.",
    "Write {big} as a product of primes and count its divisors.",
    "What is the probability of rolling a sum of {small} with two dice?",
    "The price of a bike falls from {money}00 by {percent}. What does it cost now?",
    "How many integers are between {middle} and {big}? Which of them are multiples of {small}?",
    "If f(x) = {small}x^2 - {middle}x + {small}, what is f({small})?",
    "A jar holds {middle} red and {small} white balls. Two are drawn. How likely are two red ones?",
    # sums with a story
    "{name} buys {small} {thing} for {money} each and pays with {money}0. How much is left?",
    "{name} has {big} {thing}. {name} gives {percent} of them to {name} and {small} to {name}. "
    "How many {thing} are left?",
    "{name} works {small} hours on {day} and twice as long on {day}. If the pay is {money} an "
    "hour, how much is earned in {small} weeks?",
    "{name} and {name} pick {thing}. Together they have {big}, and {name} has {middle} more than "
    "{name}. How many has each?",
    "{name} sold {middle} {thing} on {day} and {small} times as many on {day}. How many in all?",
    "There are {big} {thing} in a store. Each {day} {middle} are sold and {small} arrive. How many "
    "are there after {small} weeks?",
    "Tickets cost {money} for adults and {money} for children. A family of {small} adults and "
    "{small} children has a coupon of {percent}. What do they pay?",
    "{name} reads {middle} pages a day. A book has {big} pages. How many days until it is done, if "
    "{name} has already read {middle} pages?",
    "A tank of {big} liters loses {small} liters an hour. After how many hours is {percent} of it "
    "gone?",
    "{name} rides {middle} km in the morning and {small} km in the evening for {small} days. "
    "How far is that in all?",
    "{name} saves {money} every {day} and spends {money} every {day}. How much is saved after "
    "{middle} weeks?",
    # programs
    "Write a {language} program that {task}.",
    "Write a {language} function that {task}, and explain how it works.",
    "Develop a {language} script that {task} and prints the result.",
    "Implement a program in {language} which {task} using recursion.",
    "Write a simple website in HTML with {page}.",
    "Here is a task: a program {task}. What is a good algorithm, and how fast is it?",
    # extraction
    "What do these customers praise, and what do they complain about?\n1. {review}\n"
    "2. {review}\n3. {review}",
    "Is each of these reviews positive, negative or neutral?\n- {review}\n- {review}\n- {review}",
    "Answer each of these in one line.\n1. {fact}\n2. {fact}\n3. {fact}\n4. {fact}",
    "Turn these notes into a table.\n\n{novel}\n{novel}\n{novel}",
    "List the names of all people and their roles in this text: {novel} {novel}",
    "Read the notes and make a table of name, day and price: {name} pays {money} on {day}. {name} "
    "pays {money} on {day}. {name} pays {money} on {day}.",
    # sciences and humanities
    "Write a short introduction to {concept} for students of {field}.",
    "What is {concept}? Explain how it works and where it is used.",
    "Explain {concept} step by step, with an example.",
    "Which mistakes do beginners make when they learn about {concept}?",
    "How does {topic} affect {topic}? Give evidence for your answer.",
    "Describe the structure of an experiment that shows {concept}.",
    "What happens to {concept} when the temperature rises? Explain.",
    "Is there a connection between {topic} and {topic}? Name facts.",
    "Discuss {topic} and its impact on society. Compare {country} and {country}.",
    "How did {topic} change between 1900 and today?",
    "What are the main arguments for and against {topic}?",
    "Design a lesson plan about {topic} for high school students.",
    "Which role does {topic} play in {country}?",
    "What can we learn from {person} about {topic}?",
    # translation
    "Translate German to English: {who} {does} , {what}{addition} .",
    "Translate German to English: {remark}",
    "Translate German to English: {remark} {who} {does} , {what} .",
    "Translate German to English: {who} {does} , {what} .",
    # short questions
    "Who played {role} in {work}?",
    "who plays {role} in {work}",
    "Who wrote {work}?",
    "When was {work} made?",
    "When did {event} take place?",
    "Where was {event}?",
    "Who won {event}?",
    "What is the capital of {country}?",
    "How old is {role} in {work}?",
    "How many members has {organ}?",
    "how many people live in {country}",
    "When did {country} become a republic?",
    "What is the longest river in {country}?",
    "Who discovered {concept}?",
    "Where does {topic} come from?",
    "Who was the first president of {country}?",
    "Who sings the theme of {work}?",
    "When did {work} first come out?",
    "What is {topic} called in {country}?",
    "Who is in charge of {organ}?",
)

# Names patterns and words in a recipe: data of others is another recipe's.
DIGEST = hashlib.sha256(json.dumps([PATTERNS, WORDS]).encode()).hexdigest()[:12]


def compose(draw: Callable[[str, int], int]) -> str:
    """One user turn. ``draw(what, below)``: a number below ``below``, one for each ``what``."""
    pattern = PATTERNS[draw("pattern", len(PATTERNS))]
    place = 0

    def fill(slot: re.Match[str]) -> str:
        nonlocal place
        place += 1
        words = WORDS[slot[1]]
        return words[draw(f"slot {place}", len(words))]

    return SLOT.sub(fill, pattern)
